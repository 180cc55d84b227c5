// The form before each change. Typing in one field is a single change.

import { byId, status } from "./dom.js";
import { onChange, state } from "./state.js";

const MOST = 200;
let entries = [];
let at = 0;
let group = null;
let restore = () => {};

export function bindHistory(restorer) {
  restore = restorer;
  entries = [{ text: JSON.stringify(state), notes: [] }];
  at = 0;
  onChange((source) => record({ label: labelOf(source), group: source?.matches("input[type=text]") ? source.id : null }));
  document.addEventListener("focusout", () => { group = null; });
  document.addEventListener("keydown", keys);
  byId("undo").addEventListener("click", undo);
  byId("redo").addEventListener("click", redo);
  enable();
}

export function record({ label, notes, group: key = null } = {}) {
  const text = JSON.stringify(state);
  const last = entries[at];
  if (!last || text === last.text) return;
  if (key && key === group) {
    last.text = text;
  } else {
    entries.splice(at + 1);
    entries.push({ text, label, notes: notes ?? last.notes });
    entries.splice(0, entries.length - MOST);
    at = entries.length - 1;
  }
  group = key;
  enable();
}

const undo = () => at > 0 && move(at - 1, `Undone: ${entries[at].label}.`);
const redo = () => at < entries.length - 1 && move(at + 1, `Redone: ${entries[at + 1].label}.`);

function move(to, sentence) {
  at = to;
  group = null;
  restore(JSON.parse(entries[at].text), entries[at].notes);
  enable();
  status(sentence);
}

// A disabled button loses the focus, and Tab would start at the top of the page.
function enable() {
  const active = document.activeElement;
  byId("undo").disabled = at === 0;
  byId("redo").disabled = at === entries.length - 1;
  if (active?.disabled) byId(active.id === "undo" ? "redo" : "undo").focus();
}

function keys(event) {
  if (!(event.ctrlKey || event.metaKey) || event.altKey) return;
  // Text that is not applied yet has the browser's own undo.
  if (event.target.closest?.("dialog, textarea, input[type=search]")) return;
  const key = event.key.toLowerCase();
  const action = key === "z" ? (event.shiftKey ? redo : undo) : key === "y" ? redo : null;
  if (!action) return;
  event.preventDefault();
  action();
}

function labelOf(control) {
  const label = control?.type === "radio"
    ? control.closest("fieldset")?.querySelector("legend")
    : control?.labels?.[0];
  return label?.textContent ?? "the change";
}
