// Small helpers. Text of other origin than the server's HTML is never read as markup.

export const byId = (id) => document.getElementById(id);
export const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];

export function el(tag, { text = "", ...properties }) {
  const node = Object.assign(document.createElement(tag), properties);
  node.textContent = text;
  return node;
}

export const show = (node, visible) => node.classList.toggle("hidden", !visible);

// Focuses a control, and unfolds the section that contains it.
export function reach(control) {
  control.closest("details")?.setAttribute("open", "");
  control.focus();
  control.scrollIntoView({ block: "center" });
}

const SECONDS = 8;
let closeTimer = 0;

// A bar at the page's lower edge; the page leaves room for it. Errors and questions stay.
new ResizeObserver(([toast]) => document.documentElement.style.setProperty("--toast",
  `${Math.ceil(toast.borderBoxSize[0].blockSize)}px`)).observe(byId("toast"));

export function status(text, kind = "", ...actions) {
  clearTimeout(closeTimer);
  byId("toast").dataset.kind = byId("status").dataset.kind = kind;
  byId("status").replaceChildren(text, ...actions);
  if (text && kind !== "error" && !actions.length) scheduleClose();
}

function scheduleClose() {
  const toast = byId("toast");
  closeTimer = setTimeout(() => {
    if (toast.matches(":hover, :focus-within")) scheduleClose();
    else byId("status").replaceChildren();
  }, SECONDS * 1000);
}

export const action = (text, onclick) => el("button", { type: "button", className: "quiet", text, onclick });

export const download = (name, text) =>
  el("a", { href: `data:text/plain;charset=utf-8,${encodeURIComponent(text)}`, download: name }).click();

export function openDialog(dialog) {
  const opener = document.activeElement;
  // The event comes after closing: restore the focus only if it has not moved on.
  dialog.addEventListener("close", () => { if (document.activeElement === document.body) opener?.focus?.(); }, { once: true });
  dialog.showModal();
}

// Asks for confirmation; resolves to true or false.
export function ask({ title, text, yes }) {
  const dialog = byId("ask-dialog");
  byId("ask-title").textContent = title;
  byId("ask-text").textContent = text;
  byId("ask-do").textContent = yes;
  dialog.returnValue = "";
  openDialog(dialog);
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}

export function onSubmit(form, act) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    act(event);
  });
  form.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey) || event.target.tagName !== "TEXTAREA") return;
    event.preventDefault();
    form.requestSubmit();
  });
}

// The error in a text, beginning with its position. `point` puts the cursor there.
export function errorText(error) {
  const { line, column } = error.data ?? {};
  const place = `line ${line}, column ${column}`;
  return line ? `L${place.slice(1)}: ${error.message.replace(` (${place})`, "")}` : error.message;
}

export function point(area, data) {
  if (!data?.line || !area.value) return;
  const before = area.value.split("\n").slice(0, data.line - 1).reduce((sum, line) => sum + line.length + 1, 0);
  const at = before + data.column - 1;
  area.focus();
  area.setSelectionRange(at, Math.min(at + 1, area.value.length));
}
