"use strict";
// Sorts and copies tables, switches the theme, draws plots when they come near, prints, and reloads a watched page.
(() => {
const all = (selector, parent = document) => [...parent.querySelectorAll(selector)];
const byId = id => document.getElementById(id);
const root = document.documentElement;
const kept = (store, name) => { try { return store.getItem(name); } catch { return null; } };
const keep = (store, name, value) => { try { store.setItem(name, value); } catch { /* not kept */ } };

// ---- tables
function compare(a, b, direction) {
  if (!a || !b) return !a - !b; // missing values are last
  const gap = Number(a) - Number(b);
  return direction * (Number.isNaN(gap) ? a.localeCompare(b, undefined, {numeric: true}) : gap);
}
for (const button of all("thead button")) {
  button.addEventListener("click", () => {
    const head = button.parentElement, column = head.cellIndex, body = head.closest("table").tBodies[0];
    const sorted = {ascending: -1, descending: 1}[head.getAttribute("aria-sort")];
    const direction = sorted ?? ("descending" in head.dataset ? -1 : 1);
    for (const other of head.parentElement.cells) other.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
    const value = row => row.cells[column].dataset.value;
    body.append(...[...body.rows].sort((a, b) => compare(value(a), value(b), direction)));
  });
}

// ---- a grid: one stop of the Tab key, and arrow keys between the cells that open
const STEPS = {ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0]};
for (const table of all("table.grid")) {
  const buttons = all(".more", table);
  for (const button of buttons.slice(1)) button.tabIndex = -1;
  table.addEventListener("focusin", event => {
    if (!event.target.matches(".more")) return;
    for (const button of buttons) button.tabIndex = button === event.target ? 0 : -1;
  });
  table.addEventListener("keydown", event => {
    if (!event.target.matches(".more") || !(event.key in STEPS)) return;
    event.preventDefault();
    const rows = [...table.tBodies[0].rows], at = event.target.closest("td"), [down, right] = STEPS[event.key];
    let row = rows.indexOf(at.parentElement), column = at.cellIndex, next = null;
    while (!next && rows[row += down]?.cells[column += right]) next = rows[row].cells[column].querySelector(".more");
    next?.focus();
  });
}

// ---- copying a table, in the order that is shown
const LATEX = {
  "\\": "\\textbackslash{}", "&": "\\&", "%": "\\%", "$": "\\$", "#": "\\#", "_": "\\_", "{": "\\{", "}": "\\}",
  "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "±": "$\\pm$", "\u2212": "$-$", "ρ": "$\\rho$",
  "λ": "$\\lambda$", "<": "$<$", ">": "$>$",
};
const latexText = text => text.replace(/[\\&%$#_{}~^±\u2212ρλ<>]/g, letter => LATEX[letter]);
const markdownText = text => text.replace(/[\\|<>*_`[\]]/g, letter => `\\${letter}`).replace(/\s+/g, " ");
const textOf = cell => all(".v, .badge, :scope > button:not(.more)", cell).map(part => part.textContent.replaceAll("\u00a0", " ")).join(", ");
const isText = cell => cell.classList.contains("text");
const FORMATS = {
  LaTeX(heads, rows, title) {
    const line = cells => `  ${cells.join(" & ")} \\\\`;
    const bold = (cell, text) => (cell.classList.contains("best") ? `\\textbf{${text}}` : text);
    const cellText = cell => bold(cell, latexText(textOf(cell)) || "--");
    return [
      `% ${title.replace(/\s+/g, " ")}; needs \\usepackage{booktabs}`,
      `\\begin{tabular}{${heads.map(head => (isText(head) ? "l" : "r")).join("")}}`, "  \\toprule",
      line(heads.map(head => latexText(textOf(head)))), "  \\midrule", ...rows.map(row => line(row.map(cellText))),
      "  \\bottomrule", "\\end{tabular}", "",
    ].join("\n");
  },
  Markdown(heads, rows) {
    const line = cells => `| ${cells.join(" | ")} |`;
    const layout = heads.map(head => (isText(head) ? "---" : "---:"));
    const body = rows.map(row => line(row.map(cell => markdownText(textOf(cell)) || "-")));
    return [line(heads.map(head => markdownText(textOf(head)))), line(layout), ...body, ""].join("\n");
  },
  CSV: (heads, rows) => [heads, ...rows].map(row => row.map(cell => cell.dataset.csv).join(",") + "\r\n").join(""),
};
async function copy(text) {
  try {
    return (await navigator.clipboard.writeText(text)) ?? true;
  } catch { // no clipboard here: select the text and let the browser copy it
    const area = Object.assign(document.createElement("textarea"), {value: text});
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}
for (const button of all("button[data-copy]")) {
  button.addEventListener("click", async () => {
    const table = button.parentElement.previousElementSibling.querySelector("table"), name = button.dataset.copy;
    const rows = [...table.tBodies[0].rows].map(row => [...row.cells]);
    const done = await copy(FORMATS[name]([...table.tHead.rows[0].cells], rows, table.getAttribute("aria-label")));
    byId("status").textContent = done ? `Copied as ${name}` : "This browser does not allow copying";
    setTimeout(() => { byId("status").textContent = ""; }, 2500);
  });
}

// ---- plots
const dark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
const COARSE = matchMedia("(pointer: coarse)").matches; // a finger must scroll the page, not zoom a plot
const hasPlotly = byId("plotly").textContent.trim() !== "";
let printing = false;
function template() {
  const now = isDark() && !printing, text = now ? "#e6e8eb" : "#1b1f24", grid = now ? "#363c45" : "#dfe3e8";
  const axis = {gridcolor: grid, zerolinecolor: grid, linecolor: grid, automargin: true};
  const side = {gridcolor: grid, zerolinecolor: grid, showbackground: false, color: text};
  return {layout: {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", xaxis: axis, yaxis: axis,
    scene: {xaxis: side, yaxis: side, zaxis: side}, font: {color: text, size: 12, family: "system-ui, sans-serif"},
    hoverlabel: {bgcolor: now ? "#1d2127" : "#fff", font: {color: text}, bordercolor: grid, namelength: 40},
    modebar: {bgcolor: "rgba(0,0,0,0)", color: "#8b949e", activecolor: text},
  }};
}
const painted = new Promise(done => requestAnimationFrame(() => setTimeout(done)));
let library;
function plotly() { // decompressed after the first paint, which it would delay
  library ??= (async () => {
    await painted;
    const bytes = Uint8Array.from(atob(byId("plotly").textContent), letter => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const code = await new Response(stream).text();
    document.head.append(Object.assign(document.createElement("script"), {textContent: code}));
  })();
  return library;
}
const isSurface = plot => plot.parentElement.classList.contains("surfaces");
const scenes = layout => layout.annotations.map((_, number) => `scene${number ? number + 1 : ""}`);
function arrange(plot, layout) { // panels in as many columns as fit, and room for the legend below them
  const width = printing ? 640 : plot.clientWidth, {panel} = layout.meta;
  const legend = plot.legendHeight ?? 0, margin = {l: 8, r: 10, t: 12, b: 8};
  if (!panel) return {width, height: (layout.height ?? (width < 500 ? 240 : 290)) + legend, margin};
  const number = layout.annotations.length;
  const columns = Math.min(number, Math.max(1, Math.floor(width / panel.width)));
  const rows = Math.ceil(number / columns), side = panel.height || Math.floor(width / columns) + 40;
  const arranged = {width, height: rows * side + legend + 110, margin: {...margin, t: panel.height ? 40 : 100}};
  arranged.grid = {...layout.grid, rows, columns};
  if (!isSurface(plot)) return arranged;
  scenes(layout).forEach((name, n) => {
    const [row, column] = [Math.floor(n / columns), n % columns];
    arranged[name] = {...layout[name], domain: {row, column}};
    Object.assign(layout.annotations[n], {x: column / columns, y: 1 - row / rows});
  });
  return arranged;
}
async function draw(plot) {
  const {data, layout} = plot.figure, surface = isSurface(plot);
  const buttons = surface ? ["toImage", "resetCameraDefault3d"] : ["toImage", "zoom2d", "pan2d", "resetScale2d"];
  const config = {displaylogo: false, displayModeBar: COARSE ? false : "hover", modeBarButtons: [buttons],
    toImageButtonOptions: {format: "svg"}};
  const dragmode = COARSE && !surface ? false : layout.dragmode;
  const first = !plot.drawn;
  plot.drawn = true;
  await window.Plotly.react(plot, data, {...layout, ...arrange(plot, layout), dragmode, template: template()}, config);
  plot.style.minHeight = "";
  const height = Math.ceil(plot.querySelector(".legend .bg")?.getBoundingClientRect().height ?? 0);
  if (height !== (plot.legendHeight ?? 0)) {
    plot.legendHeight = height;
    await window.Plotly.relayout(plot, arrange(plot, layout));
  }
  for (const event of surface && first ? ["plotly_relayouting", "plotly_relayout"] : []) {
    plot.on(event, change => turned(plot, change));
  }
}
function turned(plot, change) { // plotly has no shared camera: all surfaces of a figure get that of the dragged one
  const names = scenes(plot.figure.layout), camera = change[`${names.find(name => change[`${name}.camera`])}.camera`];
  if (!camera || plot.turning) return;
  plot.turning = true;
  for (const name of names) plot.figure.layout[name].camera = camera; // for the next drawing
  window.Plotly.relayout(plot, Object.fromEntries(names.map(name => [`${name}.camera`, camera])))
    .then(() => { plot.turning = false; });
}
const redraw = () => all(".plot").filter(plot => plot.drawn).forEach(draw);
const observer = new IntersectionObserver(entries => {
  for (const {target: plot, isIntersecting} of entries) {
    plot.near = isIntersecting;
    if (isIntersecting && !plot.drawn) plotly().then(() => (plot.near || !isSurface(plot)) && !plot.drawn && draw(plot));
    if (!isIntersecting && plot.drawn && isSurface(plot)) { // browsers keep at most 16 WebGL contexts
      window.Plotly.purge(plot);
      plot.drawn = false;
    }
  }
}, {rootMargin: "200px"});
if (hasPlotly) {
  for (const plot of all(".plot")) {
    plot.figure = JSON.parse(plot.nextElementSibling.textContent);
    plot.style.minHeight = `${arrange(plot, plot.figure.layout).height}px`; // the page does not jump when it is drawn
    observer.observe(plot);
  }
}
let resized;
addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(redraw, 100); });

// ---- theme, print, contents
function themeChanged() {
  byId("theme").textContent = isDark() ? "Light theme" : "Dark theme";
  redraw();
}
if (kept(localStorage, "bsam-theme")) root.dataset.theme = kept(localStorage, "bsam-theme");
byId("theme").addEventListener("click", () => {
  root.dataset.theme = isDark() ? "light" : "dark";
  keep(localStorage, "bsam-theme", root.dataset.theme);
  themeChanged();
});
dark.addEventListener("change", themeChanged);
themeChanged();
let unfolded = [];
function redrawForPrint(on) { // every flat plot in the light theme; surfaces are left out, contours show the same
  printing = on;
  if (on) unfolded = all(":is(#claims, #verdicts) details:not([open])");
  for (const details of unfolded) details.open = on;
  if (window.Plotly) all(".plot").filter(plot => !isSurface(plot)).forEach(draw);
}
for (const [event, on] of [["beforeprint", true], ["afterprint", false]]) addEventListener(event, () => redrawForPrint(on));
byId("print").addEventListener("click", async () => { if (hasPlotly) await plotly(); print(); });
if (hasPlotly) (window.requestIdleCallback ?? (callback => setTimeout(callback, 1000)))(() => plotly()); // for Ctrl+P
for (const contents of all("#contents details")) contents.open = matchMedia("(min-width: 75rem)").matches;

// ---- a watched page loads itself again, with the same folds, unless it is in use
if ("watched" in document.body.dataset) {
  const folds = JSON.parse(kept(sessionStorage, "bsam-folds") ?? "{}");
  for (const fold of all("details[data-fold]")) fold.open = folds[fold.dataset.fold] ?? fold.open;
  addEventListener("pagehide", () => keep(sessionStorage, "bsam-folds",
    JSON.stringify(Object.fromEntries(all("details[data-fold]").map(fold => [fold.dataset.fold, fold.open])))));
  let used = Date.now();
  for (const event of ["pointermove", "keydown", "wheel", "touchmove"]) addEventListener(event, () => { used = Date.now(); });
  setInterval(() => { if (!document.hidden && Date.now() - used > 5000) location.reload(); }, 10000);
}
})();
