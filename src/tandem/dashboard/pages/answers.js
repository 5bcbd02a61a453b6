// What the model said: siblings of one task side by side, with rewards, versions and logprobs.
import { html, useState } from "./vendor/preact.js";
import { keepInAddress, useFresh } from "./app.js";
import { number, path } from "./data.js";

export function Answers({ name, steps, query, tell }) {
  const [step, setStep] = useState(query.get("step") ?? String(steps.at(-1) ?? ""));
  const [grep, setGrep] = useState(query.get("grep") ?? "");
  const [least, setLeast] = useState(query.get("min") ?? "");
  const [most, setMost] = useState(query.get("max") ?? "");
  const asked = new URLSearchParams(Object.entries({ first: step, grep, min_reward: least, max_reward: most }).filter(([, value]) => value));
  const [found, problem] = useFresh(steps.length ? path(name, `/answers?${asked}`) : "", 0, tell);
  if (!steps.length) return html`<p class="quiet">No answers here. Runs of recipe rl keep them, unless samples.share = 0; a control server has them once the run has ended.</p>`;
  const set = (key, value, put) => (put(value), keepInAddress({ [key]: value }));
  const groups = new Map();
  for (const each of found?.answers ?? []) {
    const key = `${each.step}:${each.group}`;
    groups.set(key, [...(groups.get(key) ?? []), each]);
  }
  const move = (by) => set("step", String(Math.min(steps.at(-1), Math.max(steps[0], Number(step || steps.at(-1)) + by))), setStep);
  return html`<div class="tools">
      <button aria-label="One step earlier" onClick=${() => move(-1)}>←</button>
      <label class="line">step <input type="number" min=${steps[0]} max=${steps.at(-1)} value=${step} onChange=${(e) => set("step", e.target.value, setStep)} /></label>
      <button aria-label="One step later" onClick=${() => move(1)}>→</button>
      <label class="line">reward from <input type="number" step="any" value=${least} onChange=${(e) => set("min", e.target.value, setLeast)} /></label>
      <label class="line">to <input type="number" step="any" value=${most} onChange=${(e) => set("max", e.target.value, setMost)} /></label>
      <label class="sr" for="grep">Text in prompt or answer</label><input id="grep" type="search" placeholder="Text in prompt or answer" value=${grep} onChange=${(e) => set("grep", e.target.value, setGrep)} />
      <span class="quiet">kept: steps ${steps[0]} to ${steps.at(-1)}${found && found.answers.length >= 200 ? "; the first 200 that fit" : ""}</span></div>
    ${problem && html`<p class="error" role="alert">${problem}</p>`}
    ${found && !found.answers.length && html`<p class="quiet">No answer fits.</p>`}
    ${[...groups].map(([key, siblings]) => html`<${Group} key=${key} name=${name} siblings=${siblings} tell=${tell} />`)}`;
}

function Group({ name, siblings, tell }) {
  const [first] = siblings;
  const rewards = siblings.map((each) => each.reward ?? 0);
  const best = Math.max(...rewards);
  const worst = Math.min(...rewards);
  return html`<section class="group card"><h2>step ${first.step} · task ${first.task} · ${siblings.length} ${siblings.length === 1 ? "answer" : "siblings"}</h2>
    <div class="turn"><small>prompt</small><pre>${first.prompt}</pre></div>
    <div class="siblings">${siblings.map((each) => html`<${Answer} each=${each} mark=${best === worst ? "" : each.reward === best ? "high" : each.reward === worst ? "low" : ""} prompt=${first.prompt} name=${name} tell=${tell} />`)}</div></section>`;
}

function Answer({ each, mark, prompt, name, tell }) {
  const [open, setOpen] = useState(false);
  const turns = each.messages.filter((turn, at) => !(turn.content === prompt && at < each.messages.length - 1) && turn.role !== "system");
  const parts = Object.entries(each.rewards ?? {}).filter(([, value]) => typeof value === "number");
  return html`<article class=${`answer ${mark}`}><p class="quiet"><b>reward ${number(each.reward)}</b>${each.version == null ? html`<span>version –</span>` : html`<a href=${`#/run/${encodeURIComponent(name)}/weights?version=${each.version}`}>version ${each.version}</a>`}<span>${each.tokens} tokens</span><span title="mean logprob of its tokens, in nats">logprob ${number(each.logprob, 3)}</span>${each.finish === "length" && html`<span class="pill worse">cut at the limit</span>`}</p>
    ${open ? html`<${Tokens} name=${name} sample=${each.id} tell=${tell} />` : turns.map((turn) => html`<div class=${`turn ${turn.role}`}><small>${turn.role}</small><${Said} text=${String(turn.content ?? "")} /></div>`)}
    ${each.tokens > 0 && html`<button class="small" aria-expanded=${open} onClick=${() => setOpen(!open)}>${open ? "Text" : "Tokens"}</button>`}
    ${parts.length > 0 && html`<p class="quiet">${parts.map(([key, value]) => html`<span>${key} ${number(value)}</span>`)}</p>`}</article>`;
}

const LEAST = 8;

/** Each token: the less likely it was, the redder; a number where another version went on. */
function Tokens({ name, sample, tell }) {
  const [found, problem] = useFresh(path(name, `/tokens?sample=${sample}`), 0, tell);
  if (problem) return html`<p class="error" role="alert">${problem}</p>`;
  if (!found) return html`<p class="quiet" role="status">Asking the server …</p>`;
  if (!found.turns.length) return html`<p class="quiet">The tokens of this answer were not kept: its run is of an earlier Tandem.</p>`;
  return html`<${Shades} more=" · v3: by version 3 from here on" />
    ${found.turns.map((turn) => html`<div class="turn assistant"><${Marked} tokens=${turn} /></div>`)}
    <${Rare} tokens=${found.turns.flat()} />`;
}

export const Shades = ({ more = "" }) => html`<p class="quiet key"><span>likely</span>${[0, 1, 2, 3, 4].map((level) => html`<i class=${`l${level}`}></i>`)}<span>unlikely${more}</span></p>`;

/** Text, logprob and, where it is known, version of each token. */
export function Marked({ tokens }) {
  let version = null;
  return html`<pre class="tokens">${tokens.map(([text, logprob, of]) => {
    const changed = of != null && of !== version;
    version = of;
    return html`${changed && html`<sub>v${of}</sub>`}<span class=${`l${level(logprob)}`} title=${`logprob ${number(logprob, 3)}${of == null ? "" : `, version ${of}`}`}>${text}</span>`;
  })}</pre>`;
}

export function Rare({ tokens }) {
  const rare = tokens.filter(([text]) => text).sort((a, b) => a[1] - b[1]).slice(0, LEAST);
  return html`<details><summary>the least likely tokens</summary><ol>${rare.map(([text, logprob, of]) => html`<li><code>${JSON.stringify(text)}</code> ${number(Math.exp(logprob) * 100, 2)} %${of != null && `, version ${of}`}</li>`)}</ol></details>`;
}
const level = (/** @type {number} */ logprob) => Math.min(4, Math.floor(-logprob));

/** Thoughts are folded; the rest is text and nothing else. */
function Said({ text }) {
  const found = /^\s*<think>([\s\S]*?)<\/think>/.exec(text);
  if (!found) return html`<pre>${text || " "}</pre>`;
  return html`<details><summary>thoughts, ${found[1].length} characters</summary><pre>${found[1]}</pre></details><pre>${text.slice(found[0].length).trimStart()}</pre>`;
}
