// One chart with uPlot: lines of one or several runs, raw beside smooth, log on request, and a table of the same points.
import { html, useEffect, useRef, useState } from "./vendor/preact.js";
import { number } from "./data.js";

const COLOURS = ["--main", "--accent", "--good", "--warn", "--bad", "--muted"];
const TABLE_ROWS = 200;
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** A running mean with weight `1 - by` on the newest value. The raw line stays beside it. */
export function smoothed(values, by) {
  let mean = null;
  return values.map((value) => (value == null ? null : (mean = mean == null ? value : by * mean + (1 - by) * value)));
}

/** @param {{title: string, lines: {label: string, xs: number[], ys: (number|null)[], points?: boolean}[], x?: string,
 *   smooth?: number, log?: boolean, height?: number, group?: string}} given */
export function Chart({ title, lines, x = "step", smooth = 0, log = false, height = 190, group = "" }) {
  const place = useRef(null);
  const drawn = useRef(null);
  const [open, setOpen] = useState(false);
  const [theme, setTheme] = useState(0);
  const isLog = log && lines.every((line) => line.ys.every((value) => value == null || value > 0));
  const shape = JSON.stringify([lines.map((line) => [line.label, line.points]), smooth > 0, isLog, x, theme]);
  const tables = lines.flatMap((line) => {
    const raw = [line.xs, line.ys];
    return smooth && !line.points ? [raw, [line.xs, smoothed(line.ys, smooth)]] : [raw];
  });
  const data = tables.length ? (tables.length === 1 ? tables[0] : uPlot.join(tables)) : [[], []];

  useEffect(() => {
    const dark = matchMedia("(prefers-color-scheme: dark)");
    const change = () => setTheme((n) => n + 1);
    dark.addEventListener("change", change);
    return () => dark.removeEventListener("change", change);
  }, []);
  useEffect(() => {
    const axis = { stroke: css("--muted"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line") } };
    const values = (_, marks) => marks.map((mark) => (mark == null ? "" : number(mark, 5)));
    const series = lines.flatMap((line, at) => {
      const stroke = css(COLOURS[at % COLOURS.length]);
      const one = { label: line.label, stroke, width: 1.6, spanGaps: true, value: (_, v) => number(v), dash: line.points ? [3, 4] : undefined, points: line.points ? { show: true, size: 8 } : { show: line.xs.length < 3 } };
      return smooth && !line.points ? [{ ...one, label: `${line.label} raw`, width: 1, alpha: 0.35 }, { ...one, label: `${line.label} smooth`, width: 2 }] : [one];
    });
    const plot = new uPlot(
      {
        width: Math.max(240, place.current.clientWidth),
        height,
        scales: { x: { time: false }, y: isLog ? { distr: 3 } : {} },
        cursor: { drag: { x: true, y: true, uni: 30 }, sync: group ? { key: group } : undefined },
        axes: [{ ...axis, values }, { ...axis, values, size: 62 }],
        series: [{ label: x }, ...series],
      },
      data,
      place.current,
    );
    drawn.current = plot;
    const resized = new ResizeObserver(() => plot.setSize({ width: Math.max(240, place.current?.clientWidth ?? 0), height }));
    resized.observe(place.current);
    return () => (resized.disconnect(), plot.destroy(), (drawn.current = null));
  }, [shape, height]);
  useEffect(() => {
    const plot = drawn.current;
    if (plot && plot.data !== data) plot.setData(data, plot.scales.x.max == null || plot.scales.x.max >= (plot.data[0].at(-1) ?? 0));
  });

  const first = lines[0];
  const from = Math.max(0, (first?.xs.length ?? 0) - TABLE_ROWS);
  const said = lines.map((line) => `${line.label}: ${line.ys.length} values, the last ${number(line.ys.at(-1))}`).join("; ");
  return html`<figure class="chart" role="group" aria-label=${`${title}. ${said}`}><header><h3>${title}</h3>${log && !isLog && html`<span class="quiet">no log: not all above 0</span>`}</header>
    <div class="canvas" ref=${place}></div>
    <details onToggle=${(e) => setOpen(e.target.open)}><summary>Table</summary>${open && html`<div class="scroll" tabindex="0" role="region" aria-label=${`${title}, table`}><table>
      <thead><tr><th class="num">${x}</th>${lines.map((line) => html`<th class="num">${line.label}</th>`)}</tr></thead>
      <tbody>${data[0].slice(-TABLE_ROWS).map((step, at) => html`<tr><td class="num">${number(step, 9)}</td>${lines.map((line) => html`<td class="num">${number(lookUp(line, step, from + at))}</td>`)}</tr>`)}</tbody></table></div>`}</details></figure>`;
}

const lookUp = (line, step, at) => (line.xs[at] === step ? line.ys[at] : line.ys[line.xs.indexOf(step)]);
