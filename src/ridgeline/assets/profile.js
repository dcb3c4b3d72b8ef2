// The step's timeline on a canvas: drag, wheel, pinch, buttons and keys; what is selected is spoken and shown below it.

const nsText = (ns) => {
  const [scale, unit] = ns >= 1e9 ? [1e9, "s"] : ns >= 1e6 ? [1e6, "ms"] : ns >= 1e3 ? [1e3, "µs"] : [1, "ns"];
  return `${Number((ns / scale).toPrecision(4))} ${unit}`;
};

function makeTimeline(figure) {
  const data = JSON.parse(figure.querySelector("script").textContent);
  const rows = data.rows.map(([title, packed]) => {
    const lanes = [];
    for (let i = 0, at = 0; i < packed.length; i += 3) {
      at += packed[i];
      const [name, category] = data.names[packed[i + 2]];
      lanes.push({ start: at, end: at + packed[i + 1], name, category });
    }
    return { title, lanes, idle: title === "idle" };
  });
  const AXIS = 26, TITLE = 17, BAR = 26, ROW = TITLE + BAR + 8;
  const height = AXIS + rows.length * ROW;
  const whole = Math.max(data.end, 1);
  const canvas = element("canvas", "", { tabIndex: 0 });
  canvas.style.height = `${height}px`;
  canvas.setAttribute("role", "application");
  canvas.setAttribute("aria-label", "Timeline of one step: arrow keys move between kernels, plus and minus zoom");
  const chosen = element("output", "");
  chosen.setAttribute("aria-live", "polite");
  const pen = canvas.getContext("2d");
  let from = 0, span = whole, picked = null;

  const x = (ns) => ((ns - from) / span) * canvas.clientWidth;
  const ns = (pixels) => from + (pixels / canvas.clientWidth) * span;
  const view = (start, length) => {
    span = Math.min(Math.max(length, 200), whole); // below 200 ns there is nothing to see
    from = Math.min(Math.max(start, 0), whole - span);
    draw();
  };
  const zoom = (factor, around = from + span / 2) => view(around - (around - from) * factor, span * factor);
  const move = (share) => view(from + share * span, span);

  function draw() {
    const style = getComputedStyle(figure);
    const colour = (name) => style.getPropertyValue(name).trim();
    const [ink, soft, line, surface] = ["--ink", "--soft", "--line", "--surface"].map(colour);
    const fills = data.categories.map(([, slot]) => colour(`--k${slot}`));
    const density = devicePixelRatio || 1, width = canvas.clientWidth;
    canvas.width = width * density;
    canvas.height = height * density;
    pen.scale(density, density);
    pen.font = `12px ${style.fontFamily}`;
    drawAxis(width, soft, line);
    rows.forEach((row, index) => {
      const top = AXIS + index * ROW + TITLE;
      pen.fillStyle = soft;
      pen.fillText(row.title, 0, top - 5);
      pen.fillStyle = line;
      pen.fillRect(0, top + BAR, width, 1);
      row.lanes.forEach((lane) => {
        const left = x(lane.start), right = x(lane.end);
        if (right < 0 || left > width) return;
        const start = Math.max(left, 0), wide = Math.max(Math.min(right, width) - start, 0.6);
        pen.globalAlpha = row.idle ? 0.35 : 1;
        pen.fillStyle = row.idle ? soft : fills[lane.category];
        pen.fillRect(start, top, wide > 3 ? wide - 0.8 : wide, BAR); // a sliver of air between neighbours
        pen.globalAlpha = 1;
        if (wide > 44) label(lane.name, start + 5, top + 17, wide - 10, row.idle ? ink : surface);
        if (lane === picked) {
          pen.strokeStyle = ink;
          pen.lineWidth = 2;
          pen.strokeRect(start + 1, top - 1, Math.max(wide - 2, 1), BAR + 2);
        }
      });
    });
  }

  function drawAxis(width, soft, line) {
    const rough = span / Math.max(width / 110, 2), power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((digit) => digit * power).find((value) => value >= rough);
    for (let at = Math.ceil(from / step) * step; at <= from + span; at += step) {
      pen.fillStyle = line;
      pen.fillRect(x(at), 16, 1, height);
      pen.fillStyle = soft;
      const text = at ? nsText(at) : "0";
      const wide = pen.measureText(text).width;
      pen.fillText(text, Math.min(Math.max(x(at) - wide / 2, 0), width - wide), 11);
    }
  }

  function label(name, left, base, room, colour) {
    const letters = Math.floor(room / 6.4); // of this font, near enough
    const text = name.length <= letters ? name : `${name.slice(0, letters - 1)}…`;
    if (letters < 4) return;
    pen.save();
    pen.beginPath();
    pen.rect(left, base - 14, room, 18);
    pen.clip();
    pen.fillStyle = colour;
    pen.fillText(text, left, base);
    pen.restore();
  }

  function laneAt(event) {
    const box = canvas.getBoundingClientRect();
    const row = rows[Math.floor((event.clientY - box.top - AXIS) / ROW)];
    const at = ns(event.clientX - box.left), near = (2 / canvas.clientWidth) * span;
    // of several under two pixels the nearest
    const hits = row ? row.lanes.filter((lane) => lane.start - near <= at && at <= lane.end + near) : [];
    return hits.sort((a, b) => distance(a, at) - distance(b, at))[0];
  }
  const distance = (lane, at) => Math.max(lane.start - at, at - lane.end, 0);

  const facts = (lane) => {
    const row = rows.find((other) => other.lanes.includes(lane));
    return [["class", data.categories[lane.category][0]], ["starts", nsText(lane.start)],
      ["takes", nsText(lane.end - lane.start)], ["row", row.title]];
  };
  function pick(lane) {
    if (!lane) return;
    picked = lane;
    const rest = facts(lane).map(([what, value]) => `${what} ${value}`).join(", ");
    chosen.replaceChildren(element("b", lane.name), `: ${rest}`);
    // keep what is picked in sight and wide enough to be told apart
    const middle = (lane.start + lane.end) / 2;
    if (lane.start < from || lane.end > from + span) view(middle - span / 2, span);
    else draw();
  }
  function step(direction) {
    const row = rows.find((other) => other.lanes.includes(picked)) ?? rows[0];
    if (!picked) return pick(row?.lanes.find((lane) => lane.end >= from));
    pick(row.lanes[row.lanes.indexOf(picked) + direction]);
  }
  function change(direction) {
    const at = rows.findIndex((row) => row.lanes.includes(picked));
    const row = rows[at + direction];
    const middle = picked ? (picked.start + picked.end) / 2 : from;
    if (row) pick([...row.lanes].sort((a, b) => distance(a, middle) - distance(b, middle))[0]);
  }
  function end(last) {
    const row = rows.find((other) => other.lanes.includes(picked)) ?? rows[0];
    pick(row?.lanes.at(last ? -1 : 0));
  }

  canvas.addEventListener("keydown", (event) => {
    const around = picked ? (picked.start + picked.end) / 2 : undefined;
    const act = {
      "+": () => zoom(0.5, around), "=": () => zoom(0.5, around), "-": () => zoom(2, around), 0: () => view(0, whole),
      ArrowRight: () => (event.shiftKey ? move(0.2) : step(1)), ArrowLeft: () => (event.shiftKey ? move(-0.2) : step(-1)),
      ArrowDown: () => change(1), ArrowUp: () => change(-1), Home: () => end(false), End: () => end(true),
      Escape: () => { tip.hidden = true; picked = null; chosen.textContent = ""; draw(); },
    }[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  });
  canvas.addEventListener("wheel", (event) => {
    // the page must stay scrollable past a timeline that nobody clicked
    if (document.activeElement !== canvas && !event.ctrlKey) return;
    event.preventDefault();
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) move((event.deltaX || event.deltaY) / 800);
    else zoom(1.0018 ** event.deltaY, ns(event.clientX - canvas.getBoundingClientRect().left));
  }, { passive: false });

  const fingers = new Map();
  let dragged = 0;
  canvas.addEventListener("pointerdown", (event) => {
    fingers.set(event.pointerId, event.clientX);
    canvas.setPointerCapture(event.pointerId);
    dragged = 0;
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!fingers.size) return hover(event);
    if (!fingers.has(event.pointerId)) return;
    const before = fingers.get(event.pointerId), left = canvas.getBoundingClientRect().left;
    const other = [...fingers].find(([id]) => id !== event.pointerId)?.[1];
    fingers.set(event.pointerId, event.clientX);
    dragged += Math.abs(event.clientX - before);
    if (other === undefined) move((before - event.clientX) / canvas.clientWidth);
    else zoom(Math.max(Math.abs(before - other), 8) / Math.max(Math.abs(event.clientX - other), 8), ns(other - left));
  });
  const release = (event) => {
    if (fingers.delete(event.pointerId) && event.type === "pointerup" && dragged < 4) pick(laneAt(event));
  };
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  canvas.addEventListener("dblclick", () => view(0, whole));

  function hover(event) {
    const lane = laneAt(event);
    tip.hidden = !lane;
    if (!lane) return;
    const list = element("dl", "");
    facts(lane).forEach(([what, value]) => list.append(element("dt", what), element("dd", value)));
    tip.replaceChildren(element("b", lane.name), list);
    tip.style.left = `${Math.max(Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8), 8)}px`;
    tip.style.top = `${Math.max(Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 8), 8)}px`;
  }

  const tools = element("div", "", { className: "tools" });
  tools.setAttribute("role", "group");
  tools.setAttribute("aria-label", "Timeline view");
  for (const [text, title, act] of [
    ["+", "Zoom in", () => zoom(0.5)], ["−", "Zoom out", () => zoom(2)], ["◀", "Move left", () => move(-0.4)],
    ["▶", "Move right", () => move(0.4)], ["All", "Show the whole step", () => view(0, whole)],
  ]) {
    const button = element("button", text, { type: "button", title });
    button.setAttribute("aria-label", title);
    button.addEventListener("click", act);
    tools.append(button);
  }
  figure.append(tools, canvas, chosen);
  new ResizeObserver(draw).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
}

document.querySelectorAll("figure.timeline").forEach(makeTimeline);
