// What a control server has besides runs: its targets, what was used, keys and projects, and who did what.
import { html, useState } from "./vendor/preact.js";
import { useFresh } from "./app.js";
import { readAll, usd, when } from "./data.js";
import { Deployments, Playground } from "./deployments.js";
import { Environments } from "./environments.js";

export const PAGES = {
  deployments: { title: "Deployments", paths: ["/deployments"], show: Deployments },
  playground: { title: "Playground", paths: ["/v1/models"], show: Playground },
  environments: { title: "Environments", paths: ["/packages"], show: Environments },
  targets: { title: "Targets", paths: ["/targets"], show: Targets },
  usage: { title: "Usage", paths: ["/projects", "/usage"], show: Usage },
  keys: { title: "Keys", paths: ["/keys"], show: Keys },
  audit: { title: "Audit", paths: ["/audit"], show: Audit },
};

export function ServerPage({ page, query, tell }) {
  const { title, paths, show } = PAGES[page];
  const [again, setAgain] = useState(0);
  const [first, problem] = useFresh(paths[0], 10_000, tell, again, readAll);
  const [second, other] = useFresh(paths[1] ?? "", 10_000, tell, again, readAll);
  const wrong = problem || other;
  return html`<main id="content" tabindex="-1"><h1>${title}</h1>
    ${wrong && html`<p class="error" role="alert">${wrong}</p>`}
    ${first && (second || !paths[1]) ? html`<${show} first=${first} second=${second} query=${query} changed=${() => setAgain(again + 1)} />` : !wrong && html`<p class="quiet" role="status">Asking the server …</p>`}</main>`;
}

/** @param {{ label: string, heads: [string, string?][], rows: any[][], none: string }} given */
export function Table({ label, heads, rows, none }) {
  if (!rows.length) return html`<p class="quiet">${none}</p>`;
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${label}><table><thead><tr>${heads.map(([head, kind]) => html`<th class=${kind}>${head}</th>`)}</tr></thead>
    <tbody>${rows.map((row) => html`<tr>${row.map((cell, at) => html`<td class=${heads[at][1]}>${cell}</td>`)}</tr>`)}</tbody></table></div>`;
}

function Targets({ first }) {
  return first.items.map((target) => html`<section class="card"><h2>${target.name} <span class="quiet">${target.kind}</span></h2>
    ${target.error && html`<p class="error">${target.error}</p>`}
    ${!target.error && html`<${Table} label=${`Offers of ${target.name}`} none="It offers nothing now."
      heads=${[["offer"], ["GPUs"], ["CPUs", "num"], ["memory", "num"], ["price", "num"], ["now"]]}
      rows=${target.offers.map((each) => [each.name, each.gpus ? `${each.gpus} × ${each.gpu}, ${each.gpu_memory_gib} GiB` : "none", each.cpus, `${each.memory_gib} GiB`, `${usd(each.usd_per_hour)}/h`, each.now ? "free" : each.why_not || "busy"])} />`}</section>`);
}

function Usage({ first, second }) {
  return html`<section class="card"><h2>Projects</h2><${Table} label="Projects" none="None."
      heads=${[["project"], ["spent", "num"], ["budget", "num"], ["runs at once", "num"]]}
      rows=${first.items.map((each) => [each.name, usd(each.spent_usd), each.budget_usd ? html`${usd(each.budget_usd)}<span class="progress"><i style=${{ width: `${Math.min(100, (100 * each.spent_usd) / each.budget_usd)}%` }}></i></span>` : "any", each.max_live_runs || "any"])} /></section>
    <section class="card"><h2>What ended attempts used, the newest first</h2><${Table} label="Usage" none="Nothing yet: usage is written when an attempt ends."
      heads=${[["run"], ["project"], ["ended, UTC"], ["minutes", "num"], ["cost", "num"]]}
      rows=${[...second.items].sort((a, b) => b.ended - a.ended).map((each) => [html`<a href=${`#/run/${each.run}`}>${each.run_name}</a>`, each.project, when(each.ended), ((each.ended - each.began) / 60_000).toFixed(1), usd(each.usd)])} />
      ${second.next && html`<p class="quiet">There are more; <code>tandem control usage</code> exports all.</p>`}</section>`;
}

function Keys({ first }) {
  const state = (key) => (key.revoked_at ? `revoked ${when(key.revoked_at)}` : key.expires_at && key.expires_at < Date.now() ? "expired" : key.expires_at ? `until ${when(key.expires_at)}` : "valid");
  return html`<section class="card"><h2>Keys</h2><${Table} label="Keys" none="None. tandem control key new NAME makes one."
    heads=${[["name"], ["id"], ["may"], ["project"], ["made, UTC"], ["state"]]}
    rows=${first.items.map((key) => [key.name, html`<code>${key.id}</code>`, key.scopes.join(", "), key.project || "all", when(key.at), state(key)])} /></section>`;
}

function Audit({ first }) {
  return html`<section class="card"><h2>Who did what, the newest first</h2><${Table} label="Audit" none="Nothing yet."
      heads=${[["", "num"], ["when, UTC"], ["who"], ["what"], ["on"]]}
      rows=${[...first.items].reverse().map((row) => [row.n, when(row.at), html`<code>${row.actor}</code>`, row.action, html`<code>${row.item}</code>`])} />
      ${first.next && html`<p class="quiet">There are more; <code>tandem control audit</code> lists all.</p>`}</section>`;
}
