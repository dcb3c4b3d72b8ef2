"use strict";
// Upgrades a page that already reads without scripts: sortable tables, a filter, and tooltips on the roofline.

// "22.0 µs" -> 2.2e-5, "4.73 G" -> 4.73e9, "-" -> -1: every cell of a column has the same base unit.
const numberOf = (text) => {
  const match = /^[+]?([\d.]+)\s?([nµmkMGTP]?)/.exec(text);
  return match ? match[1] * (match[2] ? 1000 ** ("nµm kMGTP".indexOf(match[2]) - 3) : 1) : -1;
};

const element = (name, text, properties = {}) => Object.assign(document.createElement(name), { textContent: text }, properties);

function makeSortable(table) {
  const heads = [...table.tHead.rows[0].cells];
  const body = table.tBodies[0];
  heads.forEach((head, column) => {
    const textual = head.classList.contains("l");
    const button = element("button", head.textContent, { type: "button" });
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const current = head.getAttribute("aria-sort");
      const ascending = current ? current === "descending" : textual;
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
      const text = (row) => row.cells[column].textContent;
      const compare = textual
        ? (a, b) => text(a).localeCompare(text(b), undefined, { numeric: true })
        : (a, b) => numberOf(text(a)) - numberOf(text(b));
      body.append(...[...body.rows].sort((a, b) => (ascending ? compare(a, b) : compare(b, a))));
    });
  });
}

// `follow(index, shown)` lets the plot dim the dots whose rows are filtered out. Returns a setter for the legend.
function makeFilter(table, follow) {
  const rows = [...table.tBodies[0].rows];
  const input = element("input", "", { type: "search", placeholder: "layer, class, shape, limiter …" });
  input.setAttribute("aria-label", "Filter " + table.caption.textContent);
  const count = element("output", "");
  const box = element("div", "", { className: "filter" });
  box.append(input, count);
  table.parentElement.before(box);
  const apply = () => {
    const wanted = input.value.trim().toLowerCase();
    let shown = 0;
    rows.forEach((row, index) => {
      const cells = [...row.cells].map((cell) => cell.textContent.toLowerCase());
      // "=pool" wants a cell that says just that
      const matches = wanted[0] === "=" ? cells.includes(wanted.slice(1)) : cells.some((text) => text.includes(wanted));
      row.hidden = !matches;
      shown += matches;
      follow(index, matches);
    });
    count.textContent = shown === rows.length ? `${shown} rows` : `${shown} of ${rows.length} rows`;
  };
  input.addEventListener("input", apply);
  apply();
  return (text) => { input.value = text; apply(); };
}

const tip = element("div", "", { id: "tip", hidden: true });
tip.setAttribute("role", "tooltip");
document.body.append(tip);

function showTip(dot, row, heads) {
  const [layer, ...rest] = [...row.cells].map((cell) => cell.textContent);
  const list = element("dl", "");
  rest.forEach((text, index) => {
    if (text && text !== "-") list.append(element("dt", heads[index + 1]), element("dd", text));
  });
  tip.replaceChildren(element("b", layer), list);
  tip.hidden = false;
  const box = dot.getBoundingClientRect();
  const left = Math.min(box.right + 12, innerWidth - tip.offsetWidth - 8);
  const top = Math.min(box.bottom + 8, innerHeight - tip.offsetHeight - 8);
  tip.style.left = `${Math.max(left, 8)}px`;
  tip.style.top = `${Math.max(top, 8)}px`;
}

// Dot i and row i are the same kernel: both lists come longest first.
function linkPlot(dots, table) {
  const heads = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
  const rows = [...table.tBodies[0].rows];
  const across = [...dots].sort((a, b) => a.cx.baseVal.value - b.cx.baseVal.value);
  const focus = (dot) => {
    dots.forEach((other) => other.setAttribute("tabindex", other === dot ? "0" : "-1"));
    dot.focus();
  };
  const reveal = (row) => {
    rows.forEach((other) => other.classList.toggle("hit", other === row));
    row.tabIndex = -1;
    row.focus({ preventScroll: true });
    row.scrollIntoView({ block: "center" });
  };
  dots.forEach((dot, index) => {
    const title = dot.querySelector("title");
    dot.setAttribute("aria-label", title.textContent);
    title.remove(); // the browser's own tooltip would cover ours
    dot.setAttribute("tabindex", dot === across[0] ? "0" : "-1");
    const show = () => showTip(dot, rows[index], heads);
    const hide = () => { tip.hidden = true; };
    dot.addEventListener("pointerenter", show);
    dot.addEventListener("pointerleave", hide);
    dot.addEventListener("focus", show);
    dot.addEventListener("blur", hide);
    dot.addEventListener("click", () => reveal(rows[index]));
    rows[index].addEventListener("pointerenter", () => dot.classList.add("on"));
    rows[index].addEventListener("pointerleave", () => dot.classList.remove("on"));
  });
  dots[0]?.parentElement.addEventListener("keydown", (event) => {
    const shown = across.filter((dot) => !dot.classList.contains("off"));
    const at = shown.indexOf(document.activeElement);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: shown.length - 1 }[event.key];
    if (event.key === "Escape") tip.hidden = true;
    else if (event.key === "Enter" && at >= 0) reveal(rows[[...dots].indexOf(shown[at])]);
    else if (to !== undefined && shown[to]) focus(shown[to]);
    else return;
    event.preventDefault();
  });
}

document.querySelectorAll("section").forEach((section) => {
  const kernels = section.querySelector("table.kernels");
  const dots = section.querySelectorAll(".points circle");
  if (kernels) linkPlot(dots, kernels);
  const setters = new Map();
  section.querySelectorAll("table.long").forEach((table) => {
    setters.set(table, makeFilter(table, (index, shown) => {
      if (table === kernels) dots[index].classList.toggle("off", !shown);
    }));
  });
  const release = () => {
    section.querySelectorAll(".legend button").forEach((button) => button.setAttribute("aria-pressed", "false"));
  };
  section.addEventListener("input", release);
  section.querySelectorAll(".legend li").forEach((item) => {
    const kind = item.textContent;
    const button = element("button", kind, { type: "button", title: `Show ${kind} alone` });
    button.setAttribute("aria-pressed", "false");
    item.replaceChildren(button);
    button.addEventListener("click", () => {
      const on = button.getAttribute("aria-pressed") === "false";
      release();
      button.setAttribute("aria-pressed", String(on));
      setters.get(kernels)(on ? `=${kind}` : "");
    });
  });
  section.querySelectorAll("table").forEach(makeSortable);
});
