// Runs beside each other: is one better, what differs in their specs, and their curves.
import { html, useEffect, useState } from "./vendor/preact.js";
import { useFresh } from "./app.js";
import { Chart } from "./chart.js";
import { number, path, read } from "./data.js";

const CURVES = ["reward/mean", "loss/total", "policy/entropy", "grad/norm"];

export function Compare({ names, tell }) {
  const asked = names.map((name) => `run=${encodeURIComponent(name)}`).join("&");
  const [found, problem] = useFresh(`compare?${asked}`, 0, tell);
  const [curves, setCurves] = useState([]);
  useEffect(() => {
    const ending = new AbortController();
    Promise.all(names.map((name) => read(path(name, `/curves?names=${CURVES.join(",")}`), ending.signal))).then(setCurves).catch(() => {});
    return () => ending.abort();
  }, [asked]);
  if (!found) return html`<main id="content" tabindex="-1"><p class=${problem ? "error" : "quiet"} role="status">${problem || "Comparing …"}</p></main>`;
  const facts = Object.keys(found.facts[0] ?? {});
  const heads = found.runs.map((name) => html`<th><a href=${`#/run/${encodeURIComponent(name)}`}>${name}</a></th>`);
  return html`<main id="content" tabindex="-1"><h1>${found.runs.slice(1).join(", ")} against ${found.runs[0]}</h1>
    <section class="card"><h2>Is it better?</h2>${found.pairings.map((each, at) => html`<${Pairing} each=${each} said=${found.said[at]} />`)}</section>
    <section class="card"><h2>Results</h2><div class="scroll" tabindex="0" role="region" aria-label="Results"><table><thead><tr><th></th>${heads}</tr></thead>
      <tbody>${facts.map((fact) => html`<tr><td class="quiet">${fact}</td>${found.facts.map((each) => html`<td>${cell(each[fact])}</td>`)}</tr>`)}</tbody></table></div></section>
    <section class="card"><h2>What differs in their specs</h2>${Object.keys(found.differences).length ? html`<div class="scroll" tabindex="0" role="region" aria-label="Differences of the specs"><table><thead><tr><th>field</th>${heads}</tr></thead>
      <tbody>${Object.entries(found.differences).map(([field, values]) => html`<tr><td><code>${field}</code></td>${values.map((value) => html`<td>${cell(value)}</td>`)}</tr>`)}</tbody></table></div>` : html`<p class="quiet">Nothing: they are equal in every field.</p>`}</section>
    <div class="charts">${CURVES.filter((key) => curves.some((each) => each.series[key])).map((key) => html`<${Chart} key=${key} title=${key} lines=${curves.filter((each) => each.series[key]).map((each) => ({ label: each.run, xs: each.series[key][0], ys: each.series[key][1] }))} group="compare" />`)}</div></main>`;
}

const cell = (value) => (value == null ? "–" : typeof value === "number" ? number(value) : typeof value === "object" ? JSON.stringify(value) : String(value));

function Pairing({ each, said }) {
  return html`<p>${each.verdict && html`<span class=${`pill ${each.verdict.verdict}`}>${each.verdict.verdict}</span> `}${said}</p>`;
}
