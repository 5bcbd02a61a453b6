// One run: how it stands, its curves, its answers, the proof of its weights, its log, attempts and spec.
import { html, useEffect, useMemo, useRef, useState } from "./vendor/preact.js";
import { keepInAddress, useFresh } from "./app.js";
import { Answers } from "./answers.js";
import { Chart } from "./chart.js";
import { bytes, change, follow, number, path, when } from "./data.js";
import { stateOf } from "./runs.js";

const TABS = { "": "Overview", curves: "Curves", answers: "Answers", weights: "Weights", log: "Log", attempts: "Attempts", spec: "Spec" };
const FIRST = { "reward/mean": "Reward", "loss/total": "Loss", "policy/entropy": "Entropy (nats)", "lag/max": "Lag (versions)", "sync/logprob_gap": "Logprob gap", "grad/norm": "Gradient norm", "time/step_s": "Seconds a step" };
const WHAT_MATTERS = ["reward/mean", "loss/total"];
const PHASES = ["time/generate_s", "time/train_s", "time/sync_s"];

export function Run({ name, tab, query, may, tell }) {
  const [again, setAgain] = useState(0);
  const [found, problem] = useFresh(path(name), 0, tell, again);
  const [stands, setStands] = useState(null);
  const [rows, setRows] = useState([]);
  useEffect(() => follow(path(name, "/follow"), (kind, data) => {
    if (kind === "row") setRows((before) => [...before, data]);
    else setStands(data);
  }, tell.live), [name]);
  useEffect(() => {
    if (stands) setAgain((n) => n + 1);
  }, [stands?.state, stands?.liveness, stands?.stage, stands?.verdict]);
  useEffect(() => {
    if (stands?.state !== "running") return;
    const timer = setInterval(() => setAgain((n) => n + 1), 10_000);
    return () => clearInterval(timer);
  }, [stands?.state]);
  if (!found) return html`<main id="content" tabindex="-1"><p class=${problem ? "error" : "quiet"} role="status">${problem || "Reading the run …"}</p></main>`;
  const now = { ...found.stands, ...(stands ?? {}) };
  if (now.liveness === "gone") now.state = "gone";
  const link = (each) => `#/run/${encodeURIComponent(name)}${each ? `/${each}` : ""}`;
  const last = rows.at(-1) ?? found.last;
  const shown = {
    "": () => html`<${Overview} found=${found} last=${last} link=${link} rows=${rows} tell=${tell} />`,
    curves: () => html`<${Curves} name=${name} names=${found.metrics} rows=${rows} query=${query} tell=${tell} />`,
    answers: () => html`<${Answers} name=${name} steps=${found.answers_of_steps} query=${query} tell=${tell} />`,
    weights: () => html`<${Weights} name=${name} query=${query} again=${rows.length} tell=${tell} />`,
    log: () => html`<${Log} name=${name} query=${query} tell=${tell} />`,
    attempts: () => html`<${Attempts} found=${found} />`,
    spec: () => html`<section class="card"><h2>spec.toml</h2><pre>${found.spec}</pre></section>`,
  };
  return html`<main id="content" tabindex="-1">
    <header><p class="quiet" style=${{ margin: 0 }}><b>${found.title}</b> ${found.recipe && `· ${found.recipe} run`} <span class=${`pill ${stateOf(now)}`}>${stateOf(now)}</span> ${found.verdict && html`<span class=${`pill ${found.verdict}`}>${found.verdict}</span>`}
      ${now.steps_total ? html` <span aria-live="polite">step ${now.step.toLocaleString("en")} of ${now.steps_total.toLocaleString("en")}${now.state === "running" && now.stage ? `, ${now.stage}` : ""}</span>` : ""}</p>
      <h1>${found.headline}</h1>
      ${found.server && may.includes("write") && html`<${Actions} name=${name} state=${now.state} want=${found.server.want} done=${() => setAgain((n) => n + 1)} />`}</header>
    <nav class="tabs" aria-label="Parts of the run">${Object.entries(TABS).map(([each, label]) => html`<a href=${link(each)} aria-current=${each === tab ? "page" : undefined}>${label}</a>`)}</nav>
    ${problem && html`<p class="error" role="alert">${problem}</p>`}
    ${(shown[tab] ?? shown[""])()}</main>`;
}

const OVER = ["succeeded", "failed", "cancelled", "stopped"];

/** End a run or let it go on, where a control server says that this key may. */
function Actions({ name, state, want, done }) {
  const [sure, setSure] = useState(false);
  const [problem, setProblem] = useState("");
  const ask = (what, body) => async () => {
    setSure(false);
    try {
      await change(`/${path(name, `/${what}`)}`, body);
      setProblem("");
    } catch (error) {
      setProblem(error.message);
    }
    done();
  };
  if (state === "succeeded") return null;
  return html`<div class="tools">${OVER.includes(state)
    ? html`<button onClick=${ask("resume", {})}>Resume from its last checkpoint</button>`
    : want !== "run"
      ? html`<span class="quiet" role="status">It was asked to ${want === "stop" ? "save and end" : "end"}.</span>${want === "stop" && html`<button onClick=${ask("cancel", { save: false })}>End it now, without saving</button>`}`
      : !sure
        ? html`<button onClick=${() => setSure(true)}>End this run …</button>`
        : html`<b role="status">End it?</b><button class="main" onClick=${ask("cancel", { save: true })}>Save a checkpoint, then end</button><button onClick=${ask("cancel", { save: false })}>End now, without saving</button><button onClick=${() => setSure(false)}>Let it go on</button>`}
    ${problem && html`<p class="error" role="alert">${problem}</p>`}</div>`;
}

/** Text whose `parts` are commands. */
const Words = ({ text }) => String(text).split("`").map((part, at) => (at % 2 ? html`<code>${part}</code>` : part));

function Overview({ found, last, link, rows, tell }) {
  const { gauge } = found;
  const key = WHAT_MATTERS.find((each) => found.metrics.includes(each));
  const [curve] = useFresh(key ? path(found.run, `/curves?names=${key}`) : "", 0, tell);
  const series = useMemo(() => (curve ? joined(curve.series, rows) : {}), [curve, rows]);
  const live = Object.entries(FIRST).filter(([key]) => last?.[key] != null);
  return html`
    ${found.why && html`<section class="card"><h2>Why it ended so</h2><p class="error">${found.why}</p>
      ${found.failure && html`<p>${found.failure.about}</p>`}<p class="next"><b>Next:</b> <${Words} text=${found.next} /></p><p><a href=${link("log")}>Its log</a></p></section>`}
    ${found.bad_step && html`<section class="card"><h2>First bad step: ${found.bad_step.step.toLocaleString("en")}</h2><p>From here on ${found.bad_step.why}.</p>
      <p><a href=${`${link("answers")}?step=${found.bad_step.step}`}>Its answers</a> · <a href=${`${link("curves")}?m=${encodeURIComponent(found.bad_step.metric)}`}>The curve</a></p></section>`}
    <section class="card"><h2>Result</h2>
      ${found.evidence && html`<p>${found.evidence}</p>`}
      ${gauge && html`<div class="gauge" role="img" aria-label=${`${found.headline} ${found.evidence}`}><i style=${{ left: `${gauge.low}%`, width: `${gauge.high - gauge.low}%` }}></i>
        <b style=${{ left: `${gauge.before}%` }}></b><b class="after" style=${{ left: `${gauge.after}%` }}></b>
        <span class="below" style=${{ left: `${Math.max(gauge.before, 4)}%` }}>${found.baseline}</span><span class="above" style=${{ left: `${Math.min(96, Math.max(3, gauge.after))}%` }}>after</span></div>`}
      ${found.caveat && html`<p class="quiet">${found.caveat}</p>`}
      ${!found.why && html`<p class="quiet">Next: <${Words} text=${found.next} /></p>`}
      <dl>${[...found.facts, ...(found.server?.facts ?? [])].map(([label, value]) => html`<div><dt>${label}</dt><dd>${value}</dd></div>`)}</dl></section>
    ${key && series[key] && html`<div style=${{ marginBottom: "16px" }}><${Chart} title=${FIRST[key]} lines=${withEvaluations([line(FIRST[key], series, key, "step")], key, curve)} height=${230} /></div>`}
    <div class="grid">
      ${live.length > 0 && html`<section class="card"><h2>Step ${last.step}</h2><dl>${live.map(([key, label]) => html`<div><dt>${label}</dt><dd>${number(last[key])}</dd></div>`)}</dl><p class="quiet" style=${{ marginTop: "12px" }}><a href=${link("curves")}>All curves</a></p></section>`}
      <section class="card"><h2>Weights</h2><p>${found.proof.verdict}</p><dl>${found.sync.map(([label, value]) => html`<div><dt>${label}</dt><dd>${value}</dd></div>`)}</dl><p class="quiet" style=${{ marginTop: "12px" }}><a href=${link("weights")}>Each version and its proof</a></p></section>
      ${found.planned.length > 0 && html`<section class="card"><h2>Plan against measured</h2><div class="scroll" tabindex="0" role="region" aria-label="Plan against measured"><table><thead><tr><th></th><th class="num">planned</th><th class="num">measured</th><th class="num">off by</th></tr></thead>
        <tbody>${found.planned.map((row) => html`<tr><td>${row.what}</td><td class="num">${row.planned}</td><td class="num">${row.measured}</td><td class="num">${row.off_by}</td></tr>`)}</tbody></table></div></section>`}
      ${found.evaluations.length > 0 && html`<section class="card"><h2>Evaluations on what was held out</h2><table><thead><tr><th>when</th><th class="num">step</th><th class="num">${found.measure}</th><th class="num">interval</th></tr></thead>
        <tbody>${found.evaluations.map((row) => html`<tr><td>${row.label}</td><td class="num">${row.step}</td><td class="num"><b>${row.value}</b> ${row.change}</td><td class="num">${row.interval}</td></tr>`)}</tbody></table></section>`}
      ${found.rewards.length > 0 && html`<section class="card"><h2>What the answers earned in training</h2><table><thead><tr><th></th><th class="num">first fifth</th><th class="num">last fifth</th><th class="num">change</th></tr></thead>
        <tbody>${found.rewards.map((row) => html`<tr><td>${row.name}</td><td class="num">${row.first}</td><td class="num"><b>${row.last}</b></td><td class="num">${row.change}</td></tr>`)}</tbody></table></section>`}
      ${found.timing.length > 0 && html`<section class="card"><h2>Where the time went</h2><table><tbody>${found.timing.map((part) => html`<tr><td>${part.label}</td><td class="num">${part.seconds.toFixed(1)} s</td><td class="num">${(100 * part.share).toFixed(1)} %</td></tr>`)}</tbody></table></section>`}
      ${found.memory.length > 0 && html`<section class="card"><h2>Memory, GiB at most</h2><table><tbody>${found.memory.map((part) => html`<tr><td>${part.total ? html`<b>${part.label}</b>` : part.label}</td><td class="num">${part.gib}</td></tr>`)}</tbody></table></section>`}
    </div>`;
}

function Curves({ name, names, rows, query, tell }) {
  const [found, problem] = useFresh(path(name, "/curves"), 0, tell);
  const [filter, setFilter] = useState(query.get("m") ?? "");
  const [log, setLog] = useState(query.get("log") === "1");
  const [smooth, setSmooth] = useState(Number(query.get("smooth") ?? 0));
  const [x, setX] = useState(query.get("x") ?? "step");
  const [other, setOther] = useState(query.get("with") ?? "");
  const [runs] = useFresh("runs", 0, tell);
  const [beside] = useFresh(other ? path(other, "/curves") : "", 0, tell);
  const series = useMemo(() => (found ? joined(found.series, rows) : {}), [found, rows]);
  if (!found) return html`<p class="quiet" role="status">${problem || "Reading the curves …"}</p>`;
  const all = Object.keys(series);
  const wanted = filter ? all.filter((key) => fits(key, filter)) : [...Object.keys(FIRST).filter((key) => series[key]), ...PHASES.filter((key) => series[key])];
  const set = (key, value, put) => (put(value), keepInAddress({ [key]: value === true ? "1" : value ? String(value) : "" }));
  return html`
    <div class="tools">
      <label class="sr" for="metric">Metrics</label><input id="metric" type="search" placeholder=${`Search ${all.length} metrics, as reward/ or time/.*_s`} value=${filter} onInput=${(e) => set("m", e.target.value, setFilter)} />
      <label class="line"><input type="checkbox" checked=${log} onChange=${(e) => set("log", e.target.checked, setLog)} />log</label>
      <label class="line">smooth <input type="range" min="0" max="0.98" step="0.02" value=${smooth} onInput=${(e) => set("smooth", Number(e.target.value), setSmooth)} /></label>
      <label class="line">x <select value=${x} onChange=${(e) => set("x", e.target.value, setX)}><option value="step">step</option><option value="time">seconds in steps</option><option value="tokens">tokens trained on</option></select></label>
      <label class="line">over <select value=${other} onChange=${(e) => set("with", e.target.value, setOther)}><option value="">no other run</option>${(runs?.runs ?? []).filter((each) => each.run !== name).slice(0, 500).map((each) => html`<option value=${each.run}>${each.title}</option>`)}</select></label>
    </div>
    ${!wanted.length && html`<p class="quiet">${all.length ? "No metric fits." : "No step yet. Curves appear with the first."}</p>`}
    <div class="charts">${wanted.slice(0, 24).map((key) => {
      const lines = [line(other ? name : FIRST[key] ?? key, series, key, x)];
      if (other && beside?.series?.[key]) lines.push(line(other, beside.series, key, x));
      return html`<${Chart} key=${key} title=${FIRST[key] ? `${FIRST[key]} · ${key}` : key} lines=${x === "step" ? withEvaluations(lines, key, found) : lines} x=${x} smooth=${smooth} log=${log} group=${name} />`;
    })}</div>
    ${wanted.length > 24 && html`<p class="quiet">${wanted.length - 24} more fit; search for fewer.</p>`}`;
}

/** The evaluations as points, over the curve that they are about. */
function withEvaluations(lines, key, { evaluations, measure }) {
  const about = { accuracy: "reward/mean", loss: "loss/total" }[measure];
  const found = evaluations.filter(([step]) => step >= (lines[0].xs[0] ?? 0) - 1); // not those before the stage of the curve
  if (key !== about || !found.length) return lines;
  return [...lines, { label: `held-out ${measure}`, xs: found.map(([step]) => step), ys: found.map(([, value]) => value), points: true }];
}

/** Letters, or a regular expression. */
function fits(key, wanted) {
  try {
    return new RegExp(wanted, "i").test(key);
  } catch {
    return key.toLowerCase().includes(wanted.toLowerCase());
  }
}

/** Columns with the rows that came since. A step that a resume repeats replaces the one before. */
function joined(series, rows) {
  if (!rows.length) return series;
  const found = Object.fromEntries(Object.entries(series).map(([key, [xs, ys]]) => [key, [[...xs], [...ys]]]));
  for (const row of rows)
    for (const [key, value] of Object.entries(row)) {
      if (key === "step" || typeof value !== "number") continue;
      const [xs, ys] = (found[key] ??= [[], []]);
      while (xs.length && xs[xs.length - 1] >= row.step) (xs.pop(), ys.pop());
      xs.push(row.step);
      ys.push(value);
    }
  return found;
}

/** One metric over steps, seconds or tokens. */
function line(label, series, key, x) {
  const [xs, ys] = series[key];
  const along = series[{ time: "time/step_s", tokens: "tokens/trained" }[x]];
  if (!along) return { label, xs, ys };
  let sum = 0;
  const sums = new Map(along[0].map((step, at) => [step, (sum += along[1][at] ?? 0)]));
  const kept = xs.map((step, at) => [sums.get(step), ys[at]]).filter(([at]) => at != null);
  return { label, xs: kept.map(([at]) => at), ys: kept.map(([, value]) => value) };
}

function Weights({ name, query, again, tell }) {
  const [found, problem] = useFresh(path(name, "/versions"), 0, tell, again);
  const wanted = Number(query.get("version") ?? NaN);
  const row = useRef(/** @type {any} */ (null));
  useEffect(() => row.current?.scrollIntoView({ block: "center" }), [Boolean(found), wanted]);
  if (!found) return html`<p class="quiet" role="status">${problem || "Reading the proofs …"}</p>`;
  return html`<section class="card"><h2>Did the engines serve the trainer's weights?</h2><p>${found.verdict}</p>
      ${found.findings.length > 0 && html`<ul>${found.findings.map((each) => html`<li><span class=${`pill ${each.severity === "failure" ? "failed" : ""}`}>${each.severity}</span> ${each.text}</li>`)}</ul>`}</section>
    ${found.versions.length > 0 && html`<section class="card"><h2>Versions, the newest first</h2>
      ${wanted >= 0 && !found.versions.some((each) => each.version === wanted) && html`<p class="next">Version ${wanted} has no proof here: the start of the run loaded it, or its proof is older than those that are shown.</p>`}<div class="scroll" tabindex="0" role="region" aria-label="Versions"><table>
      <thead><tr><th class="num">version</th><th>proven by</th><th>digest</th><th class="num">tensors</th><th class="num">bytes moved</th><th class="num">whole sync</th><th class="num">paused</th><th class="num">canary gap / limit</th><th>path</th></tr></thead>
      <tbody>${found.versions.map((each) => html`<tr key=${each.version} ref=${each.version === wanted ? row : undefined} aria-current=${each.version === wanted ? "true" : undefined}><td class="num">${each.version}</td><td><span class=${`pill ${each.verified}`}>${each.verified}</span></td><td><code>${each.digest.slice(0, 16) || "–"}</code></td><td class="num">${each.tensors}</td><td class="num">${bytes(each.bytes_moved)}</td>
        <td class="num">${ms(each.seconds.total)}</td><td class="num">${ms(each.seconds.paused ?? each.seconds.apply)}</td><td class="num">${each.canary_tokens ? `${number(each.logprob_gap, 2)} / ${number(each.gap_limit, 2)}` : "–"}</td><td class="why">${each.mode}${each.transport?.why ? `: ${each.transport.why}` : ""}</td></tr>`)}</tbody></table></div></section>`}`;
}

const ms = (seconds) => (seconds == null ? "–" : `${number(1000 * seconds, 3)} ms`);

function Log({ name, query, tell }) {
  const [file, setFile] = useState(query.get("file") ?? "log.txt");
  const [before, setBefore] = useState(0);
  const [found, problem] = useFresh(path(name, `/log?file=${encodeURIComponent(file)}&before=${before}`), before ? 0 : 3000, tell);
  if (!found) return html`<p class="quiet" role="status">${problem || "Reading the log …"}</p>`;
  const first = found.lines[0]?.line ?? 1;
  const odd = found.lines.findIndex((each) => /error|traceback|failed/i.test(each.text));
  return html`<div class="tools"><label class="line">file <select value=${file} onChange=${(e) => (setFile(e.target.value), setBefore(0), keepInAddress({ file: e.target.value }))}>${found.files.map((each) => html`<option value=${each}>${each}</option>`)}</select></label>
      <button disabled=${first <= 1} onClick=${() => setBefore(first)}>Older</button><button disabled=${!before} onClick=${() => setBefore(0)}>Newest</button>
      <button disabled=${odd < 0} onClick=${() => document.getElementById("odd")?.scrollIntoView({ block: "center" })}>First error</button></div>
    <section class="card"><h2>${file}</h2>${found.lines.length ? html`<div class="log" tabindex="0" role="region" aria-label=${file}>${found.lines.map((each, at) => html`<span id=${at === odd ? "odd" : undefined}>${each.line}</span><pre class=${at === odd ? "bad" : ""}>${each.text}</pre>`)}</div>` : html`<p class="quiet">The run has written nothing here.</p>`}</section>`;
}

function Attempts({ found }) {
  if (found.server)
    return html`<section class="card"><h2>Attempts</h2>${found.attempts.length ? html`<div class="scroll" tabindex="0" role="region" aria-label="Attempts"><table><thead><tr><th class="num">attempt</th><th>target</th><th>began, UTC</th><th>ended, UTC</th><th>why it ended</th></tr></thead>
      <tbody>${found.attempts.map((row) => html`<tr><td class="num">${row.attempt}</td><td>${row.target}</td><td>${when(row.began)}</td><td>${when(row.ended)}</td><td class="why">${row.why}</td></tr>`)}</tbody></table></div>` : html`<p class="quiet">None yet.</p>`}</section>`;
  return html`<section class="card"><h2>Attempts</h2>${found.attempts.length ? html`<div class="scroll" tabindex="0" role="region" aria-label="Attempts"><table><thead><tr><th class="num">attempt</th><th>class</th><th class="num">exit code</th><th>then</th></tr></thead>
    <tbody>${found.attempts.map((row) => html`<tr><td class="num">${row.attempt}</td><td>${row.failure?.class ?? "–"}</td><td class="num">${row.exit_code ?? "–"}</td><td class="why">${row.then ?? row.why ?? ""}</td></tr>`)}</tbody></table></div>` : html`<p class="quiet">One, without a supervisor. <code>tandem train --supervise</code> starts a run again where that helps.</p>`}</section>
    <section class="card"><h2>Events</h2>${found.events.length ? html`<div class="log">${found.events.map((each) => html`<span>${each.stage ?? each.event ?? ""}</span><pre>${JSON.stringify(each)}</pre>`)}</div>` : html`<p class="quiet">None.</p>`}</section>`;
}
