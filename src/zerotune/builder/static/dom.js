// Small helpers: elements without innerHTML, so that no text is ever read as markup.

export const byId = (id) => document.getElementById(id);
export const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];

const SVG = "http://www.w3.org/2000/svg";

function make(node, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "text") node.textContent = value;
    else if (name === "value") node.value = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export const el = (tag, properties = {}, ...children) =>
  make(document.createElement(tag), properties, children);
export const svg = (tag, properties = {}, ...children) =>
  make(document.createElementNS(SVG, tag), properties, children);

export const show = (node, visible) => node.classList.toggle("hidden", !visible);

export function fill(node, ...children) {
  node.replaceChildren(...children.filter((child) => child !== null && child !== undefined));
}

export const idOf = (path) => path.replace(/[^A-Za-z0-9]+/g, "-");

export function status(text, kind = "") {
  const line = byId("status");
  line.dataset.kind = kind;
  line.textContent = text;
}

export function download(name, text) {
  const address = URL.createObjectURL(new Blob([text], { type: "text/plain" }));
  const link = el("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

export function openDialog(dialog) {
  const opener = document.activeElement;
  dialog.addEventListener("close", () => opener?.focus?.(), { once: true });
  dialog.showModal();
}
