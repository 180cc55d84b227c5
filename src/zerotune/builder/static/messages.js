// Shows each message next to its field, with repair buttons, and an index, errors first.

import { all, byId, capital, el, fill, reach } from "./dom.js";
import { changed, rename, write } from "./state.js";

const WORD = { error: "Error", warning: "Warning", note: "Note" };

function box(message, link) {
  return el("div", { class: "message", "data-severity": message.severity },
    el("b", { text: `${WORD[message.severity]}: ` }),
    link,
    message.text,
    message.change ? el("code", { text: ` ${message.change}` }) : null,
    message.fix ? el("span", { class: "fix", text: fixOf(message) }) : null,
    message.repairs?.length ? el("div", { class: "repairs" }, ...message.repairs.map((repair) => button(message, repair))) : null);
}

// Users know the fields of the setup by their labels, not by their paths.
export const fixOf = ({ fix }) => `Fix: ${fix}.`.replaceAll("..", ".").replace("?.", "?").replaceAll("setup.", "");

const button = (message, repair) => el("button", { type: "button", class: "repair", text: repair.label,
  "aria-label": `${repair.label}, for ${message.key}`, onclick: () => mend(message, repair) });

function mend(message, repair) {
  const [first, second] = repair.edits;
  if (repair.moves) rename(first.store, first.path, second.path);
  else for (const { store, path, value } of repair.edits) write(store, path, value);
  // The button disappears with the message, so the focus moves to its field.
  const holder = holderFor(message.key, holdersNow());
  (holder && controlOf(holder) || byId("summary-title")).focus({ preventScroll: true });
  changed(null);
}

// The holder of a key, or of what stands for the nearest section above it.
function holderOf(key, holders) {
  for (let path = key; path; path = path.slice(0, Math.max(path.lastIndexOf("."), 0))) {
    const found = ["", ".device", ".type", ".stage", ".enabled"].map((end) => holders.get(path + end)).find(Boolean);
    if (found) return found;
  }
  return undefined;
}

const controlOf = (holder) =>
  holder.closest(".field")?.querySelector("input:not([type=radio]), select, input:checked, input");

const ALIAS = { "fp16.enabled": "bf16.enabled",
  zero_allow_untested_optimizer: "optimizer.type", zero_force_ds_cpu_optimizer: "optimizer.type" };

const holdersNow = () => new Map(all("[data-messages]").map((holder) => [holder.dataset.messages, holder]));
const holderFor = (key, holders) => holderOf(ALIAS[key] ?? key, holders);

export function renderMessages(messages) {
  const holders = holdersNow();
  for (const holder of holders.values()) {
    fill(holder);
    controlOf(holder)?.removeAttribute("aria-invalid");
  }
  const listed = messages.map((message) => ({ message, holder: holderFor(message.key, holders) }));
  for (const { message, holder } of listed) {
    if (!holder) continue;
    place(holder, message, isOf(holder, message) ? null : name(message));
    if (message.severity === "error") controlOf(holder)?.setAttribute("aria-invalid", "true");
  }
  summarise(listed);
}

// Errors and warnings are always visible; notes are folded.
function place(holder, message, key) {
  let notes = holder.querySelector("details.notes");
  if (message.severity !== "note") return holder.insertBefore(box(message, key), notes);
  if (!notes) {
    notes = el("details", { class: "notes" }, el("summary"));
    holder.append(notes);
  }
  notes.append(box(message, key));
  const count = notes.childElementCount - 1;
  fill(notes.firstElementChild, count === 1 ? "1 note" : `${count} notes`,
    el("span", { class: "unseen", text: ` on ${nameOf(holder)}` }));
}

// Whether a field is the very one, and neither the nearest section above it nor one that stands for it.
function isOf(holder, { key }) {
  const shown = holder.dataset.messages;
  return shown === key || [".device", ".type"].some((end) => shown === key + end);
}

// What a holder's field is called, for who hears its notes without seeing where they stand.
function nameOf(holder) {
  const field = holder.closest(".field, section");
  return field?.querySelector("label, legend, h2")?.textContent ?? holder.dataset.messages;
}

// Shows messages without a field, and links to the others.
function summarise(listed) {
  const homeless = listed.filter(({ holder }) => !holder).map(({ message }) => box(message, name(message)));
  const placed = listed.filter(({ message, holder }) => holder && message.severity !== "note");
  const index = placed.map(({ message, holder }) => el("li", { "data-severity": message.severity },
    el("b", { text: WORD[message.severity] }), ` at `, link(message, holder)));
  fill(byId("general"), ...homeless, index.length ? el("ul", { class: "index" }, ...index) : null);
}

const name = (message) => (message.key ? el("code", { text: `${message.key}: ` }) : null);

const SEVERITY = { fits: "good", unknown: "good", short: "error", stopped: "error" };

export function chipsOf(data) {
  const count = (severity) => data.messages.filter((message) => message.severity === severity).length;
  return [[SEVERITY[data.verdict.kind], data.verdict.brief], ...["error", "warning"]
    .filter((severity) => count(severity))
    .map((severity) => [severity, `${count(severity)} ${severity}${count(severity) > 1 ? "s" : ""}`])];
}

export function renderCounts(chips) {
  fill(byId("counts"), ...chips.map(([severity, text]) => el("span", { class: "count", "data-severity": severity, text })));
}

function link(message, holder) {
  const control = controlOf(holder);
  if (!control) return el("code", { text: message.key });
  const text = message.key.startsWith("setup.") ? nameOf(holder) : message.key;
  return el("a", { href: `#${control.id}`, text, onclick: (event) => {
    event.preventDefault();
    reach(control);
  } });
}

// Shows the verdict, the plan's title and the predicted time of a step.
export function renderTitle(data) {
  const { kind, text } = data.verdict;
  byId("verdict").dataset.severity = SEVERITY[kind];
  fill(byId("verdict"), `${capital(text)}.`);
  fill(byId("title"), capital(data.title ?? ""));
  const { time } = data;
  fill(byId("time"), ...(time ? [el("b", { text: time.seconds }), ` per step, predicted; ${time.rates}.`] : []));
}
