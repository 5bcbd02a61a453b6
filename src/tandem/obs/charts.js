// Draws the charts of report.html with uPlot: hover for values, drag to zoom, double-click to see all, log on request.
"use strict";
(() => {
  const { charts, metrics } = JSON.parse(document.getElementById("chart-data").textContent);
  const place = document.getElementById("charts");
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const colours = ["--main", "--accent", "--good", "--warn", "--bad", "--muted"];

  // uPlot takes one list of steps, and for each series a list of values with null where it has none.
  const joined = (series, isLog) => {
    const tables = series.map(([, steps, values]) => [steps, isLog ? values.map((v) => (v > 0 ? v : null)) : values]);
    return uPlot.join(tables);
  };
  const short = (value, digits) => {
    const size = Math.abs(value);
    return size && (size < 1e-3 || size >= 1e6) ? value.toExponential(1) : String(Number(value.toPrecision(digits)));
  };

  const draw = (box, chart, height) => {
    const isLog = box.querySelector("input").checked;
    const axis = { stroke: css("--muted"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line") } };
    const values = (_, marks) => marks.map((mark) => (mark == null ? "" : short(mark, 5)));
    const canvas = box.querySelector(".canvas");
    canvas.replaceChildren();
    const plot = new uPlot(
      {
        width: Math.max(240, canvas.clientWidth),
        height,
        scales: { x: { time: false }, y: isLog ? { distr: 3 } : {} },
        cursor: { drag: { x: true, y: true, uni: 30 } },
        axes: [{ ...axis, values }, { ...axis, values, size: 62 }],
        series: [
          { label: "step" },
          ...chart.series.map(([label, , , isPoints], at) => ({
            label,
            stroke: css(colours[at % colours.length]),
            width: 1.6,
            spanGaps: true,
            dash: isPoints ? [3, 4] : undefined,
            points: isPoints ? { show: true, size: 8 } : undefined,
            value: (_, value) => (value == null ? "–" : short(value, 4)),
          })),
        ],
      },
      joined(chart.series, isLog),
      canvas,
    );
    box.plot = plot;
  };

  const add = (chart, height) => {
    const box = document.createElement("div");
    const head = document.createElement("div");
    const title = document.createElement("b");
    const log = document.createElement("label");
    const check = document.createElement("input");
    const canvas = document.createElement("div");
    box.className = "chart";
    head.className = "chart-head";
    canvas.className = "canvas";
    title.textContent = chart.title;
    check.type = "checkbox";
    log.append(check, " log");
    head.append(title, log);
    box.append(head, canvas);
    place.append(box);
    box.redraw = () => draw(box, chart, height);
    check.addEventListener("change", box.redraw);
    return { box, title };
  };

  const boxes = charts.map((chart, at) => add(chart, at ? 190 : 280).box);
  boxes.slice(0, 1).forEach((box) => box.classList.add("wide-chart"));
  const names = Object.keys(metrics);
  if (names.length) {
    const chart = { title: "", series: metrics[names[0]] };
    const { box, title } = add(chart, 190);
    const choice = document.createElement("select");
    choice.setAttribute("aria-label", "metric");
    choice.append(...names.map((name) => new Option(name, name)));
    choice.addEventListener("change", () => {
      chart.series = metrics[choice.value];
      box.redraw();
    });
    title.replaceWith(choice);
    boxes.push(box);
  }
  const redraw = () => boxes.forEach((box) => box.redraw());
  redraw(); // after all boxes are there: each has its width now
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth === width) return; // a phone's address bar changes the height only
    width = window.innerWidth;
    redraw();
  });
  document.querySelectorAll(".curves").forEach((picture) => { picture.hidden = true; });
})();
