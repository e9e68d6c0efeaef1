"use strict";
// What a mark of a drawing says, at the pointer or at the focus; copies of texts; everything open in print.
const tips = JSON.parse(document.getElementById("tips").textContent);
const tip = document.getElementById("tip");
const said = new Map(); // by mark
const NEAR = 16; // pixels from the pointer to the middle of a mark
let shown = null;
let leaving = 0;

function element(name, text, ...children) {
  const made = document.createElement(name);
  made.append(...(text === null ? [] : [text]), ...children);
  return made;
}

function visible(text) {
  return text.replaceAll("\t", "⇥\t").replaceAll("\n", "⏎\n");
}

function place() {
  if (!shown) return;
  const at = shown.getBoundingClientRect();
  const left = at.left + at.width / 2 - tip.offsetWidth / 2;
  const below = at.bottom + 8 + tip.offsetHeight <= innerHeight || at.top - 8 - tip.offsetHeight < 0;
  tip.style.left = Math.max(8, Math.min(left, document.documentElement.clientWidth - tip.offsetWidth - 8)) + "px";
  tip.style.top = (below ? at.bottom + 8 : at.top - 8 - tip.offsetHeight) + "px";
}

function show(mark) {
  clearTimeout(leaving);
  if (shown === mark) return;
  if (shown) shown.classList.remove("on");
  shown = mark;
  mark.classList.add("on");
  const says = said.get(mark);
  const rows = says.rows.flatMap(([name, value]) => [element("dt", name), element("dd", value)]);
  const texts = says.examples.map(([before, guess]) =>
    element("pre", "…" + before, element("mark", visible(guess))));
  tip.replaceChildren(element("strong", says.title), element("dl", null, ...rows), ...texts);
  tip.hidden = false;
  place();
}

function hide() {
  clearTimeout(leaving);
  if (shown) shown.classList.remove("on");
  shown = null;
  tip.hidden = true;
}

function hideSoon() { // the pointer may go on to the tip itself
  clearTimeout(leaving);
  leaving = setTimeout(hide, 150);
}

for (const [id, all] of Object.entries(tips)) {
  const places = document.getElementById(id).querySelectorAll("use");
  all.forEach((says, i) => {
    const about = [says.title, ...says.rows.map((row) => row.join(" "))].join("; ");
    const attributes = { class: "mark", role: "img", tabindex: -1, "aria-label": about, "aria-describedby": "tip" };
    for (const [name, value] of Object.entries(attributes)) places[i].setAttribute(name, value);
    said.set(places[i], { ...says, id });
  });
}

for (const drawing of document.querySelectorAll(".picture svg")) {
  const marks = [...drawing.querySelectorAll(".mark")];
  if (!marks.length) continue;
  const next = {
    ArrowRight: (mark) => marks[marks.indexOf(mark) + 1],
    ArrowLeft: (mark) => marks[marks.indexOf(mark) - 1],
    ArrowUp: (mark) => marks.find((other) => said.get(other).id === said.get(mark).above),
    ArrowDown: (mark) => marks.find((other) => said.get(other).above === said.get(mark).id),
    Home: () => marks[0],
    End: () => marks[marks.length - 1],
  };
  marks[0].setAttribute("tabindex", 0); // one stop of the Tab key for each drawing
  drawing.addEventListener("pointermove", (event) => { // marks are small: the nearest one speaks
    const far = (mark) => {
      const at = mark.getBoundingClientRect();
      return Math.hypot(event.clientX - at.x - at.width / 2, event.clientY - at.y - at.height / 2);
    };
    const mark = marks.reduce((best, other) => (far(other) < far(best) ? other : best));
    if (far(mark) < NEAR) show(mark);
    else hideSoon();
  });
  drawing.addEventListener("pointerleave", hideSoon);
  for (const mark of marks) {
    mark.addEventListener("focus", () => {
      for (const other of marks) other.setAttribute("tabindex", other === mark ? 0 : -1);
      show(mark);
    });
    mark.addEventListener("blur", hide);
    mark.addEventListener("keydown", (event) => {
      const other = next[event.key] && next[event.key](mark);
      if (next[event.key]) event.preventDefault();
      if (other) other.focus();
    });
  }
}
tip.addEventListener("pointerenter", () => clearTimeout(leaving));
tip.addEventListener("pointerleave", hideSoon);
document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
document.addEventListener("scroll", place, { capture: true, passive: true });
addEventListener("resize", place);

for (const box of document.querySelectorAll(".scroll")) {
  const fade = () => box.classList.toggle("more", box.scrollLeft + box.clientWidth < box.scrollWidth - 2);
  box.addEventListener("scroll", fade, { passive: true });
  new ResizeObserver(fade).observe(box);
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // no clipboard without a secure origin
    const area = document.body.appendChild(element("textarea", text));
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

for (const button of document.querySelectorAll("button[data-copy]")) {
  button.hidden = false;
  button.addEventListener("click", async () => {
    await copy(document.getElementById(button.dataset.copy).textContent);
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
}

addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details")) details.open = true;
});
