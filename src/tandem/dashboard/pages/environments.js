// Packages of environments: versions, where each came from, which are yanked, and how to use one.
import { html, useEffect, useState } from "./vendor/preact.js";
import { keepInAddress } from "./app.js";
import { bytes, read, when } from "./data.js";
import { Table } from "./server.js";

const SHOWN = 20;
const MOST_ROWS = 60;
const cut = (/** @type {string} */ text, most = 300) => (text.length > most ? `${text.slice(0, most)} …` : text);
const isTrial = (/** @type {string} */ version) => /[a-z]/i.test(version.replace(/\.?post\d+/i, "").split("+")[0]);
/** What a spec without a version gets: the newest that is neither yanked nor a pre-release. */
const newest = (it) => [...it.versions].reverse().find((each) => !each.yanked_at && !isTrial(each.version));

export function Environments({ first, query }) {
  const [text, setText] = useState(query.get("q") ?? "");
  const [all, setAll] = useState(false);
  const [open, setOpen] = useState(query.get("show") ?? "");
  if (!first.items.length)
    return html`<div class="card empty"><h1>No environment was pushed yet</h1><p>A directory with a reward function and a <code>pyproject.toml</code> is a package.</p><p><code>tandem env push DIRECTORY</code> checks it, and keeps it here under a version whose bytes never change.</p></div>`;
  const wanted = text.trim().toLowerCase();
  const found = first.items.filter((each) => `${each.title} ${each.id} ${each.project} ${each.versions.at(-1)?.summary ?? ""}`.toLowerCase().includes(wanted));
  const toggle = (key) => {
    const next = key === open ? "" : key;
    setOpen(next);
    keepInAddress({ show: next });
  };
  return html`<div class="tools" role="search"><label class="sr" for="packages">Filter environments</label>
      <input id="packages" type="search" placeholder="Filter by name, project or what it says" value=${text} onInput=${(e) => (setText(e.target.value), keepInAddress({ q: e.target.value }))} />
      <span class="quiet" role="status">${found.length.toLocaleString("en")} of ${first.items.length.toLocaleString("en")}</span></div>
    ${!found.length && html`<p class="quiet">No environment fits this filter.</p>`}
    ${found.slice(0, all ? found.length : SHOWN).map((each) => html`<${Package} key=${each.id} it=${each} open=${open} toggle=${toggle} />`)}
    ${found.length > SHOWN && !all && html`<p><button onClick=${() => setAll(true)}>Show all ${found.length.toLocaleString("en")}</button></p>`}`;
}

function Package({ it, open, toggle }) {
  const best = newest(it);
  const last = it.versions.at(-1);
  const [more, setMore] = useState(false);
  const versions = [...it.versions].reverse();
  const name = best ? `${it.title}==${best.version}` : it.title;
  return html`<section class="card"><h2>${it.title} <span class="quiet">${it.project ? `only project ${it.project}` : "every project"}</span></h2>
    <p class="why">${cut(last?.summary || "It says nothing about itself.")}</p>
    ${best
      ? html`<div class="use"><pre tabindex="0" role="region" aria-label=${`How to use ${it.title}`}>${`[environment]\nname = "${name}"`}</pre><${Copy} text=${`[environment]\nname = "${name}"\n`} what=${it.title} /></div>`
      : html`<p class="next">No version is chosen by default: each is yanked or a trial. Name one in the spec: <code>name = "${it.title}==VERSION"</code></p>`}
    <${Table} label=${`Versions of ${it.title}`} none="It has no version."
      heads=${[["version"], ["state"], ["environments", "wide"], ["pushed, UTC", "wide"], ["by", "wide"], ["size", "num wide"], ["", "num"]]}
      rows=${versions.slice(0, more ? versions.length : MOST_ROWS).map((each) => {
        const key = `${it.id}@${each.version}`;
        return [html`<b>${each.version}</b>`, html`<${State} each=${each} best=${best} />`, Object.keys(each.environments).join(", "), when(each.at), html`<code>${each.pushed_by}</code>`, bytes(each.size),
          html`<button class="small" aria-expanded=${open === key} onClick=${() => toggle(key)}>Where from<span class="sr"> is ${each.version}</span></button>`];
      })} />
    ${versions.length > MOST_ROWS && !more && html`<p><button onClick=${() => setMore(true)}>Show all ${versions.length.toLocaleString("en")} versions</button></p>`}
    ${versions.filter((each) => open === `${it.id}@${each.version}`).map((each) => html`<${Origin} key=${each.version} of=${each} />`)}</section>`;
}

function State({ each, best }) {
  if (each.yanked_at) return html`<span class="pill failed">yanked</span> <span class="why">${cut(each.yanked_why || "no reason given")}</span>`;
  if (each === best) return html`<span class="pill succeeded">default</span>`;
  return html`<span class="why">${isTrial(each.version) ? "a trial" : "older"}</span>`;
}

/** What the server signed when the version was pushed. The page shows it, and cannot check the signature. */
function Origin({ of }) {
  const [found, setFound] = useState(/** @type {any} */ (null));
  const [problem, setProblem] = useState("");
  useEffect(() => {
    const ending = new AbortController();
    read(`/simple/${encodeURIComponent(of.id)}/${encodeURIComponent(of.file)}.provenance`, ending.signal)
      .then((told) => setFound(JSON.parse(new TextDecoder().decode(Uint8Array.from(atob(told.payload), (each) => each.charCodeAt(0)))).predicate))
      .catch((error) => ending.signal.aborted || setProblem(error.message));
    return () => ending.abort();
  }, [of.id, of.file]);
  const facts = found && [
    ["Pushed by", `${found.pushed_by.key} of ${found.pushed_by.org}`],
    ["Python", of.requires_python || "any"],
    ["Needs", of.requires.join(", ") || "nothing"],
    ...Object.entries(found.build).map(([name, value]) => [`Build: ${name}`, value]),
    ...Object.entries(found.checks).map(([name, value]) => [`Check: ${name}`, String(value)]),
    ...Object.entries(found.versions).map(([name, value]) => [`Version of ${name}`, value]),
  ];
  return html`<div class="origin"><h3>Where ${of.version} came from</h3>
    ${problem && html`<p class="error" role="alert">${problem}</p>`}
    ${!found && !problem && html`<p class="quiet" role="status">Asking the server …</p>`}
    ${facts && html`<dl>${facts.map(([name, value]) => html`<div><dt>${cut(name, 80)}</dt><dd>${cut(value)}</dd></div>`)}</dl>
      <p class="quiet">File <code>${of.file}</code>, SHA-256 <code>${of.sha256}</code></p>
      <p class="quiet">The server signed this when it was pushed. <code>tandem env verify ${of.title}==${of.version}</code> checks the signature and the bytes.</p>`}</div>`;
}

function Copy({ text, what }) {
  const [done, setDone] = useState(false);
  if (!navigator.clipboard) return null;
  const copy = () => navigator.clipboard.writeText(text).then(() => (setDone(true), setTimeout(() => setDone(false), 2000)), () => {});
  return html`<button class="small" onClick=${copy}><span role="status">${done ? "Copied" : "Copy"}</span><span class="sr"> the lines for ${what}</span></button>`;
}
