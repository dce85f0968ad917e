"use strict";
// Shows the JSON of page_data. Text of runs only goes into textContent and attributes, never into HTML.
(() => {
const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";

function node(tag, attributes = {}, ...children) {
  const made = tag === "svg" || tag === "path" || tag === "line" || tag === "ellipse"
    ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") for (const [event, listener] of Object.entries(value)) made.addEventListener(event, listener);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value);
  }
  made.append(...children.filter(child => child !== null && child !== undefined && child !== ""));
  return made;
}
const plural = (n, noun) => `${n} ${noun}${n === 1 ? "" : "s"}`;
const main = document.getElementById("content");

// ---- theme
const root = document.documentElement;
const dark = matchMedia("(prefers-color-scheme: dark)");
const stored = name => { try { return localStorage.getItem(name); } catch { return null; } };
const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
let printing = false;
function themeChanged() {
  document.getElementById("theme").textContent = isDark() ? "Light theme" : "Dark theme";
  for (const figure of figures) figure.redraw();
}

// ---- numbers as text
const minus = text => text.replace("-", "\u2212");
function fixed(value, digits) { // toFixed rounds an exact tie up; Python, which writes the verdicts, to the even digit
  const text = value.toFixed(digits), tie = Math.abs(value) * 2 ** (digits + 1) % 2 === 1;
  const odd = Number(text.at(-1)) % 2 === 1;
  return minus(tie && odd ? (value - Math.sign(value) * 10 ** -(digits + 1)).toFixed(digits) : text);
}
const signed = (value, digits) => (value < 0 ? "" : "+") + fixed(value, digits);
const short = value => minus(String(Number(value.toPrecision(4))));

function statistics(numbers, digits) {
  if (!numbers || numbers.mean === null) return "";
  const spread = numbers.std === null ? "" : ` ± ${fixed(numbers.std, digits)}`;
  return fixed(numbers.mean, digits) + spread;
}

// ---- tables: a column has a title, `text` to show, `value` to sort by, the `first` direction, and numbers for CSV
const bestFirst = experiment => (experiment.higher_is_better ? -1 : 1);
function digitsOf(experiment) {
  const largest = Math.max(...experiment.rows.map(row => Math.abs(row.mean ?? 0)));
  return largest >= 10 ? 2 : largest >= 1 ? 3 : 4;
}

function columnsOf(experiment) {
  const rows = experiment.rows, digits = digitsOf(experiment), first = bestFirst(experiment);
  const some = value => rows.some(row => value(row) !== null && value(row) !== undefined && value(row) !== "");
  const plain = (title, value, text = short, name = title) => ({
    title, value, text: row => (value(row) === null ? "" : text(value(row))), csv: {[name]: value},
  });
  const of = (title, numbers, format, name) => ({
    title, value: row => numbers(row).mean, text: row => statistics(numbers(row), format),
    csv: {[name]: row => numbers(row).mean, [`${name} std`]: row => numbers(row).std},
  });
  const columns = [
    {title: "method", value: row => row.method, text: row => row.method, csv: {method: row => row.method}, head: true},
    {
      title: experiment.unit, kind: "score", first, value: row => row.mean,
      text: row => (row.n ? `${statistics(row, digits)} (${row.n})` : ""),
      badges: row => [["did not learn", row.not_learned], ["diverged", row.diverged], ["unfinished", row.unfinished],
          ["not started", row.not_started]].filter(([, n]) => n),
      csv: {
        mean: row => row.mean, std: row => row.std, n: row => row.n, "did not learn": row => row.not_learned,
        diverged: row => row.diverged,
        unfinished: row => row.unfinished, "not started": row => row.not_started,
      },
    },
    {
      title: `difference to ${experiment.baseline}, 95 % interval (seeds)`, first,
          value: row => row.difference?.mean ?? null,
      text: row => {
        const d = row.difference;
        if (!d) return "";
        const interval = d.low === null ? "" : ` [${signed(d.low, digits)}, ${signed(d.high, digits)}]`;
        return `${signed(d.mean, digits)}${interval} (${d.n})`;
      },
      chart: intervalChart(rows),
      csv: {
        difference: row => row.difference?.mean ?? null, low: row => row.difference?.low ?? null,
        high: row => row.difference?.high ?? null, seeds: row => row.difference?.n ?? null,
      },
    },
    plain("published", row => row.published, value => fixed(value, digits)),
    of("wrong labels memorised, %", row => row.memorised, 1, "memorised"),
    of(experiment.top_eigenvalue, row => row.top_eigenvalue, 1, experiment.top_eigenvalue),
    plain("passes per step", row => row.passes),
    plain("seconds per epoch", row => row.seconds, value => short(Number(value.toPrecision(3)))),
    plain("total radius", row => row.radius),
    {title: "how chosen", value: row => row.chosen, text: row => row.chosen, csv: {chosen: row => row.chosen},
        words: true},
  ];
  return columns.filter((column, i) => i < 2 || some(column.value));
}

// A drawing of the 95 % intervals on one scale, cut off at three times the largest difference.
function intervalChart(rows) {
  const differences = rows.map(row => row.difference).filter(d => d && d.low !== null);
  const reach = 3 * Math.max(...rows.map(row => Math.abs(row.difference?.mean ?? 0)), 1e-12);
  if (!differences.length) return null;
  const low = Math.max(-reach, Math.min(0, ...differences.map(d => d.low)));
  const high = Math.min(reach, Math.max(0, ...differences.map(d => d.high)));
  const x = value => 4 + 92 * (Math.min(Math.max(value, low), high) - low) / (high - low);
  return row => {
    const d = row.difference;
    if (!d) return null;
    const zero = node("line", {x1: x(0), x2: x(0), y1: 0, y2: 16, stroke: "currentColor", "stroke-dasharray": "2 2",
        opacity: 0.6});
    const bar = d.low === null ? null
      : node("line", {x1: x(d.low), x2: x(d.high), y1: 8, y2: 8, stroke: "currentColor", "stroke-width": 2});
    const dot = node("ellipse", {cx: x(d.mean), cy: 8, rx: 4.6, ry: 3.3, fill: "currentColor"});
    return node("svg", {class: "interval", width: 72, height: 16, viewBox: "0 0 100 16", preserveAspectRatio: "none",
        "aria-hidden": "true"}, zero, bar, dot);
  };
}

function compare(a, b, direction) {
  const missing = value => value === null || value === undefined || value === "";
  if (missing(a) || missing(b)) return missing(a) - missing(b);
  return direction * (typeof a === "string" ? a.localeCompare(b, undefined, {numeric: true}) : a - b);
}

function sortableTable(caption, columns, rows, rowClass = () => null) {
  let shown = [...rows];
  const body = node("tbody");
  const cell = (column, row) => {
    const attributes = {class: [column.kind, column.head || column.words ? "text" : "",
        column.long ? "long" : ""].join(" ").trim() || null};
    const badges = (column.badges?.(row) ?? []).flatMap(([state, n]) =>
      [" ", node("span", {class: `badge ${state.replaceAll(" ", "-")}`},
          typeof n === "number" ? `${n} ${state}` : state)]);
    const content = [column.text(row), ...badges, column.chart?.(row)];
    return column.head ? node("th", {scope: "row", ...attributes}, ...content) : node("td", attributes, ...content);
  };
  const fill = () => body.replaceChildren(
    ...shown.map(row => node("tr", {class: rowClass(row)}, ...columns.map(column => cell(column, row)))));
  const heads = columns.map(column => {
    const button = node("button", {type: "button"}, column.title);
    const head = node("th", {scope: "col", "aria-sort": "none", class: column.head || column.words ? "text" : null},
        button);
    button.addEventListener("click", () => {
      const sorted = {ascending: 1, descending: -1}[head.getAttribute("aria-sort")];
      const direction = sorted ? -sorted : column.first ?? 1;
      for (const other of heads) other.setAttribute("aria-sort", "none");
      head.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
      shown = [...rows].sort((a, b) => compare(column.value(a), column.value(b), direction));
      fill();
    });
    return head;
  });
  fill();
  const table = node("table", {"aria-label": caption}, node("thead", {}, node("tr", {}, ...heads)), body);
  const scroll = node("div", {class: "scroll", tabindex: "0", role: "region", "aria-label": caption}, table);
  return {element: scroll, columns, rows: () => shown};
}

// ---- copying a table, in the order that is shown
const LATEX = {
  "\\": "\\textbackslash{}", "&": "\\&", "%": "\\%", "$": "\\$", "#": "\\#", "_": "\\_", "{": "\\{", "}": "\\}",
  "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "±": "$\\pm$", "\u2212": "$-$", "ρ": "$\\rho$",
      "λ": "$\\lambda$",
  "<": "$<$", ">": "$>$",
};
const latexText = text => text.replace(/[\\&%$#_{}~^±\u2212ρλ<>]/g, letter => LATEX[letter]);
const markdownText = text => text.replace(/[\\|<>*_`[\]]/g, letter => `\\${letter}`).replace(/\s+/g, " ");
const csvText = value => {
  const text = value === null || value === undefined ? "" : String(value);
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
};
const texts = (column, row) =>
  [column.text(row), ...(column.badges?.(row) ?? []).map(([state, n]) => `${n} ${state}`)].filter(Boolean).join(", ");
const FORMATS = {
  LaTeX({columns, rows}, experiment) {
    const line = cells => `  ${cells.join(" & ")} \\\\`;
    const best = bestRow(experiment);
    const cells = row => columns.map(column => {
      const text = latexText(texts(column, row)) || "--";
      return row === best && column.kind === "score" ? `\\textbf{${text}}` : text;
    });
    const layout = columns.map(column => (column.head || column.words ? "l" : "r")).join("");
    return [
      `% ${experiment.title.replace(/\s+/g, " ")}; needs \\usepackage{booktabs}`, `\\begin{tabular}{${layout}}`,
          "  \\toprule",
      line(columns.map(column => latexText(column.title))), "  \\midrule", ...rows().map(row => line(cells(row))),
      "  \\bottomrule", "\\end{tabular}", "",
    ].join("\n");
  },
  Markdown({columns, rows}) {
    const line = cells => `| ${cells.join(" | ")} |`;
    const layout = columns.map(column => (column.head || column.words ? "---" : "---:"));
    const body = rows().map(row => line(columns.map(column => markdownText(texts(column, row)) || "-")));
    return [line(columns.map(column => markdownText(column.title))), line(layout), ...body, ""].join("\n");
  },
  CSV({columns, rows}) {
    const fields = columns.flatMap(column => Object.entries(column.csv));
    const lines = [fields.map(([name]) => csvText(name)), ...rows().map(row => fields.map(([,
        value]) => csvText(value(row))))];
    return lines.map(line => line.join(",")).join("\r\n") + "\r\n";
  },
};

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // no clipboard here: select the text and let the browser copy it
    const area = node("textarea", {"aria-hidden": "true", style: "position: fixed; top: 0; opacity: 0"});
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    if (!done) return false;
  }
  return true;
}

let timer;
function say(text) {
  const status = document.getElementById("status");
  status.textContent = text;
  clearTimeout(timer);
  timer = setTimeout(() => { status.textContent = ""; }, 2500);
}

function copyButtons(table, experiment) {
  const buttons = Object.entries(FORMATS).map(([name, format]) => node("button", {
    type: "button", on: {click: async () =>
      say((await copy(format(table, experiment))) ? `Copied as ${name}` : "This browser does not allow copying")},
  }, name));
  return node("div", {class: "tools no-print", role: "group", "aria-label": "Copy the table"}, node("span",
      {class: "small"}, "Copy as"), ...buttons);
}

function bestRow(experiment) {
  const sign = experiment.higher_is_better ? 1 : -1;
  const known = experiment.rows.filter(row => row.mean !== null && !row.not_learned);
  return known.length > 1 ? known.reduce((best, row) => (sign * row.mean > sign * best.mean ? row : best)) : null;
}

// ---- verdicts
const SIGNS = {
  confirmed: "✓", contradicted: "✗", "not confirmed": "≈", better: "✓", worse: "✗", open: "?", "too few seeds": "…",
  "did not learn": "⚠",
};
const undecided = ({outcome}) => outcome === "open" || outcome === "too few seeds";
const titleOf = ({claim, experiment}) => (experiment ? claim.slice(0, -`: ${experiment}`.length) : claim);
function seedsLeft({outcome, more_seeds: n}) {
  if (!n) return "";
  const least = outcome === "too few seeds" ? "; at least three shared seeds are needed" : "";
  return `About ${plural(n, "more seed")} would decide, if mean and spread stay${least}.`;
}
const MANY = 8; // with more verdicts, the undecided ones of an experiment are folded

function card(verdict) {
  const more = seedsLeft(verdict);
  return node("article", {class: `card ${verdict.outcome.replaceAll(" ", "-")}`},
    node("p", {class: "outcome"},
        `${SIGNS[verdict.outcome] ?? ""} ${verdict.outcome}${verdict.at ? ` ${verdict.at}` : ""}`),
    node("h3", {}, titleOf(verdict)),
    node("p", {}, verdict.evidence),
    more ? node("p", {class: "muted"}, more) : null);
}
const cards = verdicts => (verdicts.length ? node("div", {class: "cards"}, ...verdicts.map(card)) : null);

function tally(verdicts) {
  const counts = Object.keys(SIGNS).map(outcome => [outcome, verdicts.filter(v => v.outcome === outcome).length]);
  return counts.filter(([, n]) => n).map(([outcome, n]) => `${n} ${outcome}`).join(", ");
}

const GROUPS = {paper: "Claims of the paper", baseline: "Each method against its baseline"};
function verdictSection() {
  const section = node("section", {id: "verdicts"}, node("h2", {}, "Verdicts"));
  section.append(node("p", {class: "muted"},
    "A verdict needs at least three shared seeds. Verdicts on several methods against one baseline, on matched radii " +
    "and on eigenvalues are corrected for the number of comparisons (Holm); the intervals are not."));
  [...new Set(data.verdicts.map(verdict => verdict.group))].forEach((group, i) => {
    const verdicts = data.verdicts.filter(verdict => verdict.group === group);
    const parts = [];
    for (const title of new Set(verdicts.map(verdict => verdict.experiment))) {
      const these = verdicts.filter(verdict => verdict.experiment === title);
      const number = data.experiments.findIndex(experiment => experiment.title === title);
      if (title) parts.push(node("h4", {}, node("a", {href: `#experiment-${number}`}, title)));
      if (verdicts.length <= MANY) {
        parts.push(cards(these));
      } else {
        const open = these.filter(undecided);
        parts.push(cards(these.filter(verdict => !undecided(verdict))));
        if (open.length) {
          const names = [...new Set(open.map(titleOf))];
          const listed = names.slice(0, 3).join("; ") + (names.length > 3 ? "; …" : "");
          parts.push(node("details", {"data-fold": `open ${group} ${title}`}, node("summary", {},
              `${SIGNS.open} ${tally(open)}: ${listed}`), cards(open)));
        }
      }
    }
    section.append(node("details", {open: i ? null : "", "data-fold": `verdicts ${group}`},
      node("summary", {}, node("strong", {}, GROUPS[group] ?? group), ` (${tally(verdicts)})`),
          ...parts.filter(Boolean)));
  });
  return section;
}

// ---- figures
// Okabe and Ito's colours, with dashes and markers for readers who do not see them
const COLOURS = {
  light: ["#5f6368", "#0072b2", "#d55e00", "#009e73", "#b8578f", "#b57c00", "#3a9bd6", "#000000"],
  dark: ["#b9bec5", "#3fa0e6", "#ff8a3d", "#26c99a", "#e59cc4", "#efb73e", "#8fd6ff", "#ffffff"],
};
const DASHES = ["solid", "dash", "longdash", "dashdot", "dot"];
const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "x", "star", "triangle-down", "hourglass"];
const SHAPES = {
  circle: "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0z", square: "M-4-4h8v8h-8z",
      diamond: "M0-5.5L5.5 0 0 5.5-5.5 0z",
  "triangle-up": "M0-5L5 4H-5z", cross: "M-2-5h4v3h3v4h-3v3h-4v-3h-3v-4h3z",
      x: "M-5-3L-3-5 0-2 3-5 5-3 2 0 5 3 3 5 0 2-3 5-5 3-2 0z",
  star: "M0-6L1.8-1.9 6-1.7 2.8 1.1 3.9 5.5 0 3-3.9 5.5-2.8 1.1-6-1.7-1.8-1.9z", "triangle-down": "M0 5L5-4H-5z",
      hourglass: "M-5-5H5L-5 5H5z",
};
const DOTTED = {dash: "dot", width: 1.2};
const PATTERNS = {solid: "", dash: "6 3", longdash: "10 3", dashdot: "6 2 1 2", dot: "2 2"};
const VIRIDIS = ["#440154", "#482878", "#3e4989", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b",
    "#fde725"];
const SCALE = VIRIDIS.map((colour, i) => [i / (VIRIDIS.length - 1), colour]);
const colourOf = style => COLOURS[isDark() && !printing ? "dark" : "light"][style[0] % 8];
const figures = [];

let library;
const painted = new Promise(done => requestAnimationFrame(() => setTimeout(done)));
function plotly() { // decompressed after the first paint, which it would delay
  library ??= (async () => {
    await painted;
    const bytes = Uint8Array.from(atob(document.getElementById("plotly").textContent), letter => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
    return window.Plotly;
  })();
  return library;
}

// plotly.js reads tags in text, so "<" must be an entity
const plotText = text => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");
function escaped(value, key = "") {
  if (typeof value === "string") return ["name", "text", "ticktext"].includes(key) ? plotText(value) : value;
  if (Array.isArray(value)) {
    const hasText = typeof value[0] === "string" || Array.isArray(value[0]);
    return hasText ? value.map(item => escaped(item, key)) : value;
  }
  if (value && typeof value === "object") return Object.fromEntries(Object.entries(value).map(([name, item]) => [name,
      escaped(item, name)]));
  return value;
}

function styled(trace, hidden) {
  const {method, style, band, dotted, ...rest} = escaped(trace);
  const colour = colourOf(style), n = style[1];
  const made = {...rest, name: plotText(method), showlegend: false, visible: !hidden.has(method)};
  if (trace.type === "contour") {
    return {
      ...made, colorscale: SCALE, zmin: 0, zmax: 1, autocontour: false, showscale: false,
      contours: {start: 0, end: 1, size: 1 / 11}, line: {color: "rgba(255,255,255,0.7)", width: 0.7},
      hovertemplate: "%{x:.2f}, %{y:.2f}: loss %{text}<extra></extra>",
    };
  }
  if (trace.type === "surface") {
    return {
      ...made, colorscale: SCALE, cmin: 0, cmax: 1, showscale: false,
      hovertemplate: "%{x:.2f}, %{y:.2f}: loss %{z:.3g}<extra></extra>",
    };
  }
  if (trace.type === "bar") return {...made, marker: {color: colour}, hovertemplate: "%{x:.3g}: %{y}<extra></extra>"};
  if (band) return {...made, line: {width: 0}, fillcolor: `${colour}2e`};
  return {
    ...made, line: {color: colour, ...(dotted ? DOTTED : {dash: DASHES[n % 5], width: 2})},
    marker: {color: colour, symbol: SYMBOLS[n % 9], size: 10, line: {color: isDark() && !printing ? "#14171b" : "#fff",
        width: 1}},
    ...(trace.error_y ? {error_y: {...trace.error_y, color: colour, thickness: 1.5, width: 4}} : {}),
  };
}

let camera = {eye: {x: 1.7, y: 1.7, z: 1.1}, center: {x: 0, y: 0, z: -0.1}};
const PAPER = {plotly: 640, panels: 300, contours: 200}; // pixels of a plot on paper
function layoutOf(panel, kind, element) {
  const isDarkNow = isDark() && !printing;
  const text = isDarkNow ? "#e6e8eb" : "#1b1f24", grid = isDarkNow ? "#363c45" : "#dfe3e8";
  const axis = {gridcolor: grid, zerolinecolor: grid, linecolor: grid, automargin: true};
  const {xaxis = {}, yaxis = {}, scene = {}, ...rest} = escaped(panel.layout);
  const narrow = element.clientWidth < 420;
  const made = {
    ...rest, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false,
    font: {color: text, size: narrow ? 11 : 12, family: "system-ui, sans-serif"}, margin: {l: 8, r: 10, t: 12, b: 8},
    hoverlabel: {bgcolor: isDarkNow ? "#1d2127" : "#fff", font: {color: text}, bordercolor: grid, namelength: 40},
    modebar: {bgcolor: "rgba(0,0,0,0)", color: "#8b949e", activecolor: text},
    ...(COARSE ? {dragmode: false} : {}),
    ...(printing ? {width: element.closest(".several")?.matches(".plotly") ? PAPER.panels : PAPER[kind],
        height: kind === "contours" ? 200 : 270} : {}),
  };
  if (kind === "surfaces") {
    const side = {title: {text: ""}, gridcolor: grid, zerolinecolor: grid, showbackground: false, nticks: 5};
    return {
      ...made, dragmode: "turntable", margin: {l: 0, r: 0, t: 0, b: 0},
      scene: {xaxis: side, yaxis: side, zaxis: {...side, ...scene.zaxis}, aspectmode: "cube",
          camera: structuredClone(camera)},
    };
  }
  if (kind === "contours") {
    const ends = {...axis, nticks: 5, showgrid: false};
    return {...made, xaxis: {...ends, constrain: "domain"}, yaxis: {...ends, scaleanchor: "x", constrain: "domain"}};
  }
  return {...made, xaxis: {...axis, ...xaxis}, yaxis: {...axis, ...yaxis}};
}
const COARSE = matchMedia("(pointer: coarse)").matches; // a finger must scroll the page, not zoom a plot
const BUTTONS = {surfaces: ["toImage", "resetCameraDefault3d"], other: ["toImage", "zoom2d", "pan2d", "resetScale2d"]};
const configOf = kind => ({
  responsive: true, displaylogo: false, displayModeBar: COARSE ? false : "hover",
  modeBarButtons: [BUTTONS[kind] ?? BUTTONS.other], toImageButtonOptions: {format: kind === "surfaces" ? "png" : "svg"},
});

function sample({style, mode = "", dotted}) { // a line and a marker as in the plot
  const colour = colourOf(style), n = style[1];
  const {dash, width} = dotted ? DOTTED : {dash: DASHES[n % 5], width: 2};
  const line = mode.includes("lines") ? node("line", {x1: 0, x2: 28, y1: 6, y2: 6, stroke: colour,
      "stroke-width": width, "stroke-dasharray": PATTERNS[dash] || null}) : null;
  const marker = mode.includes("markers") ? node("path", {d: SHAPES[SYMBOLS[n % 9]], fill: colour,
      transform: "translate(14 6)"}) : null;
  return node("svg", {width: 28, height: 12, viewBox: "0 0 28 12", "aria-hidden": "true"}, line, marker);
}

class PlotFigure {
  constructor(info) {
    this.info = info;
    this.hidden = new Set();
    this.near = false;
    this.plots = info.panels.map(() => node("div", {class: "plot"}));
    const panels = info.panels.map((panel, i) => node("div", {class: "panel"}, panel.title ? node("h4", {},
        panel.title) : null, this.plots[i]));
    this.legend = node("div", {class: "legend", role: "group", "aria-label": "Methods: show or hide"});
    this.element = node("figure", {class: [info.kind, info.panels.length > 1 ? "wide several" : ""].join(" ").trim()},
      node("h3", {}, info.title), info.levels ? scaleBar(info.levels) : null, node("div", {class: "panels"}, ...panels),
      info.kind === "plotly" ? this.legend : null, node("figcaption", {}, info.caption));
    this.fillLegend();
    for (const plot of this.plots) watch(plot, near => this.seen(plot, near));
  }

  fillLegend() {
    const styles = new Map(this.info.panels.flatMap(panel => panel.data).map(trace => [trace.method, trace]));
    this.legend.replaceChildren(...[...styles].map(([method, trace]) => node("button", {
      type: "button", "aria-pressed": String(!this.hidden.has(method)), on: {click: event => this.toggle(method,
          event.currentTarget)},
    }, sample(trace), method)));
  }

  toggle(method, button) {
    this.hidden[this.hidden.has(method) ? "delete" : "add"](method);
    button.setAttribute("aria-pressed", String(!this.hidden.has(method)));
    this.plots.forEach(plot => plot.drawn && this.draw(plot));
  }

  seen(plot, near) {
    plot.near = near;
    if (near && !plot.drawn) {
      plotly().then(() => (plot.near || this.info.kind !== "surfaces") && !plot.drawn && this.draw(plot));
    } else if (!near && plot.drawn && this.info.kind === "surfaces") { // browsers keep at most 16 WebGL contexts
      window.Plotly.purge(plot);
      plot.drawn = false;
    }
  }

  draw(plot) {
    const {info} = this, panel = info.panels[this.plots.indexOf(plot)];
    const traces = panel.data.map(trace => styled(trace, this.hidden));
    if (info.kind === "contours") {
      traces.push({x: [0], y: [0], mode: "markers", marker: {symbol: "cross-thin", size: 11, line: {color: "#fff",
          width: 1.5}}, hoverinfo: "skip", showlegend: false});
    }
    const first = !plot.drawn;
    plot.drawn = true;
    const done = window.Plotly.react(plot, traces, layoutOf(panel, info.kind, plot), configOf(info.kind));
    if (first && info.kind === "surfaces") {
      plot.removeAllListeners?.("plotly_relayouting");
      plot.removeAllListeners?.("plotly_relayout");
      plot.on("plotly_relayouting", change => this.turned(plot, change));
      plot.on("plotly_relayout", change => this.turned(plot, change));
    }
    return done;
  }

  turned(plot, change) { // all surfaces of the figure share the camera of the one that is dragged
    const moved = change?.["scene.camera"];
    if (!moved || (this.following && plot !== this.dragged)) return; // else a follower would lead in turn
    camera = structuredClone(moved);
    this.dragged = plot;
    if (!this.following) this.follow();
  }

  async follow() {
    this.following = true;
    for (let shown = null; shown !== camera;) { // it may be dragged further meanwhile
      shown = camera;
      const others = this.plots.filter(plot => plot !== this.dragged && plot.drawn);
      await Promise.all(others.map(plot => window.Plotly.relayout(plot, {"scene.camera": structuredClone(shown)})));
    }
    this.following = false;
  }

  redraw() {
    this.fillLegend();
    this.plots.forEach(plot => plot.drawn && this.draw(plot));
  }

  drawAll() {
    if (this.info.kind !== "surfaces") this.plots.forEach(plot => this.draw(plot));
  }
}

function scaleBar(levels) {
  const ticks = [0, 3, 6, 9, 11].map(i => node("span", {}, short(levels[i])));
  return node("div", {class: "scale"}, "loss", node("div", {class: "bar",
      style: `background: linear-gradient(to right, ${VIRIDIS.join(", ")})`}),
    node("div", {class: "ticks"}, ...ticks));
}

const watched = new Map();
const observer = new IntersectionObserver(entries => {
  for (const entry of entries) watched.get(entry.target)(entry.isIntersecting);
}, {rootMargin: "200px"});
function watch(element, callback) {
  watched.set(element, callback);
  observer.observe(element);
}

function imageFigure(info) {
  const picture = item => {
    const lines = item.lines && node("svg", {viewBox: "0 0 1 1", preserveAspectRatio: "none"},
      ...[["#202020", 0.035], [null, 0.016]].flatMap(([outline, width]) => item.lines.map(([colour, x1, y1, x2, y2]) =>
        node("line", {x1, y1, x2, y2, stroke: outline ?? colour, "stroke-width": width, "stroke-linecap": "round"}))));
    const source = item.src ?? info.pictures[item.picture];
    const image = node("img", {src: source, alt: item.text ? `${item.text}; ${item.small}` : "",
        class: source.startsWith("data:image/png") ? "pixels" : null});
    return node("div", {class: "picture"}, node("div", {class: "frame"}, image, lines),
      item.text ? node("div", {}, item.text) : null, item.small ? node("div", {class: "muted"}, item.small) : null);
  };
  return node("figure", {class: "wide"}, node("h3", {}, info.title), node("figcaption", {}, info.caption),
    ...info.rows.flatMap(row => [node("h4", {}, row.title), node("div", {class: "pictures"},
        ...row.items.map(picture))]));
}

// ---- experiments
function runList(experiment) {
  const columns = [
    {title: "run", value: run => run.name, text: run => run.name, head: true},
    {title: "method", value: run => run.method, text: run => run.method, words: true},
    {title: "seed", value: run => run.seed, text: run => String(run.seed)},
    {title: "state", value: run => run.state, text: () => "", badges: run => [[run.state, run.state]], words: true},
    {title: "epochs", value: run => run.epochs_done,
        text: run =>
          (run.epochs_done || run.epochs ? `${run.epochs_done}${run.epochs ? ` of ${run.epochs}` : ""}` : "")},
    {title: "score", first: bestFirst(experiment), value: run => run.score,
        text: run => (run.score === null ? "" : fixed(run.score, digitsOf(experiment)))},
    {title: "remark", value: run => run.reason, text: run => run.reason ?? "", words: true, long: true},
  ].filter((column, i) => i < 6 || experiment.runs.some(run => run.reason));
  const runs = [...experiment.runs].sort((a, b) => (a.state === "finished") - (b.state === "finished")); // others first
  return node("details", {"data-fold": `runs ${experiment.title}`}, node("summary", {}, runCounts(runs)),
    sortableTable(`Runs: ${experiment.title}`, columns, runs).element);
}

function runCounts(runs) {
  const states = [...new Set(runs.map(run => run.state))];
  const counts = states.map(state => `${runs.filter(run => run.state === state).length} ${state}`);
  return `${plural(runs.length, "run")}: ${counts.join(", ")}`;
}

function experimentSection(experiment, number) {
  const section = node("section", {id: `experiment-${number}`}, node("h2", {}, experiment.title));
  const best = bestRow(experiment);
  const table = sortableTable(experiment.title, columnsOf(experiment), experiment.rows,
      row => (row === best ? "best" : null));
  section.append(table.element, copyButtons(table, experiment), runList(experiment));
  const infos = experiment.figures.map(id => data.figures[id]);
  const grid = node("div", {class: "figures"});
  for (const info of infos) {
    if (info.kind === "images") grid.append(imageFigure(info));
    else if (hasPlotly) {
      const figure = new PlotFigure(info);
      figures.push(figure);
      grid.append(figure.element);
    }
  }
  section.append(grid);
  return section;
}

// ---- the page
const hasPlotly = document.getElementById("plotly").textContent.trim() !== "";
const allRuns = data.experiments.flatMap(experiment => experiment.runs);
document.getElementById("about").textContent =
  `${plural(data.experiments.length, "experiment")}, ${allRuns.length ? runCounts(allRuns) : "no runs"}. ` +
  `Made on ${data.created}.`;
if (data.version && !allRuns.length) {
  main.append(node("p", {id: "waiting"}, "Waiting for the first run. The page shows it as soon as it is there."));
}
const problems = [...data.problems];
if (!hasPlotly) problems.push("This page has no plots, because plotly was not installed when it was written.");
if (problems.length) {
  const list = node("ul", {}, ...problems.map(problem => node("li", {}, problem)));
  main.append(node("div", {class: "problems", role: "note"}, problems.length > 8
    ? node("details", {"data-fold": "problems"}, node("summary", {}, node("strong", {}, plural(problems.length,
        "problem"))), list)
    : node("div", {}, node("strong", {}, plural(problems.length, "problem")), list)));
}
if (data.verdicts.length) main.append(verdictSection());
data.experiments.forEach((experiment, i) => main.append(experimentSection(experiment, i)));
main.append(node("section", {id: "notes"}, node("h2", {}, "How to read the numbers"),
  node("p", {}, "A score is that of the last epoch: mean ± sample standard deviation (number of seeds). " +
    "Differences are paired over the seeds that both methods have; the 95 % interval is Student's t, not corrected for " +
    "several comparisons, and says nothing about one seed. Only finished runs count in means. λmax is the largest " +
    "eigenvalue of the Hessian, without label smoothing and with the labels used in training. Tables show the value " +
    "computed at the end of training, figures those of bsam flatness; their labels say on how many samples. " +
    "The best mean of a table is bold, which says nothing about chance: see the intervals. A method is not compared " +
    "if one of its networks did not learn, which means that it is no better than chance. Tuned settings are within " +
    "the noise if another candidate's score was within a standard error of the best, and at the edge of the grid if " +
    "they are the smallest or the largest that were tried.")));

const links = [
  ...(data.verdicts.length ? [["verdicts", "Verdicts"]] : []),
  ...data.experiments.map((experiment, i) => [`experiment-${i}`, experiment.title]), ["notes",
      "How to read the numbers"],
];
const list = node("ol", {}, ...links.map(([id, title]) => node("li", {}, node("a", {href: `#${id}`}, title))));
const wide = matchMedia("(min-width: 75rem)").matches;
document.getElementById("contents").append(node("details", {open: wide ? "" : null, "data-fold": "contents"},
    node("summary", {}, "Contents"), list));

if (stored("bsam-theme")) root.dataset.theme = stored("bsam-theme");
document.getElementById("theme").addEventListener("click", () => {
  root.dataset.theme = isDark() ? "light" : "dark";
  try { localStorage.setItem("bsam-theme", root.dataset.theme); } catch { /* not kept */ }
  themeChanged();
});
dark.addEventListener("change", themeChanged);
themeChanged();

// For print, draw every plot in the light theme and unfold the verdicts; surfaces are left out, contours show the same.
let unfolded = [];
function redrawForPrint(on) {
  printing = on;
  if (on) unfolded = [...document.querySelectorAll("#verdicts details:not([open])")];
  for (const details of unfolded) details.open = on;
  if (window.Plotly) for (const figure of figures) { figure.fillLegend(); figure.drawAll(); }
}
addEventListener("beforeprint", () => redrawForPrint(true));
addEventListener("afterprint", () => redrawForPrint(false));
document.getElementById("print").addEventListener("click", async () => {
  if (hasPlotly) await plotly();
  print();
});

// Load plotly.js when the browser has time, so that Ctrl+P finds it.
if (hasPlotly) (window.requestIdleCallback ?? (callback => setTimeout(callback, 1000)))(() => plotly());

// A served page loads itself again when the runs have changed, with the same folds.
if (data.version) {
  const folds = () => [...document.querySelectorAll("details[data-fold]")];
  try {
    const kept = JSON.parse(sessionStorage.getItem("bsam-folds")) ?? {};
    for (const details of folds()) details.open = kept[details.dataset.fold] ?? details.open;
  } catch { /* not kept */ }
  addEventListener("pagehide", () => {
    const kept = Object.fromEntries(folds().map(details => [details.dataset.fold, details.open]));
    try { sessionStorage.setItem("bsam-folds", JSON.stringify(kept)); } catch { /* not kept */ }
  });
  setInterval(async () => {
    try {
      const answer = await (await fetch("version")).json();
      if (answer.version !== data.version && !document.hidden) location.reload();
    } catch { /* the server has stopped: the page stays */ }
  }, 5000);
}
})();
