// Each message beside the field it is about, all of them in one list, errors first.

import { action, all, byId, el, fill, show } from "./dom.js";
import { changed, read, write } from "./state.js";

const WORD = { error: "Error", warning: "Warning", note: "Note" };

function box(message, link) {
  return el("div", { class: "message", "data-severity": message.severity },
    el("b", { text: `${WORD[message.severity]}: ` }),
    link,
    message.text,
    message.change ? el("code", { text: ` ${message.change}` }) : null,
    message.fix ? el("span", { class: "fix", text: `Fix: ${message.fix}.`.replaceAll("..", ".") }) : null);
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

export function renderMessages(messages) {
  const holders = new Map();
  for (const holder of all("[data-messages]")) {
    fill(holder);
    holders.set(holder.dataset.messages, holder);
    controlOf(holder)?.removeAttribute("aria-invalid");
  }
  const alias = { "fp16.enabled": "bf16.enabled", "setup.batch": "train_micro_batch_size_per_gpu",
    zero_allow_untested_optimizer: "optimizer.type", zero_force_ds_cpu_optimizer: "optimizer.type" };
  const listed = [];
  for (const message of messages) {
    const holder = holderOf(alias[message.key] ?? message.key, holders);
    if (holder) {
      place(holder, message);
      const control = controlOf(holder);
      if (message.severity === "error") control?.setAttribute("aria-invalid", "true");
    }
    listed.push({ message, holder });
  }
  summarise(listed);
}

// Errors and warnings are seen at once; notes are there for who asks.
function place(holder, message) {
  if (message.severity !== "note") return holder.prepend(box(message, null));
  let notes = holder.querySelector("details.notes");
  if (!notes) {
    notes = el("details", { class: "notes" }, el("summary"));
    holder.append(notes);
  }
  notes.append(box(message, null));
  const count = notes.childElementCount - 1;
  fill(notes.firstElementChild, count === 1 ? "1 note" : `${count} notes`,
    el("span", { class: "unseen", text: ` on ${nameOf(holder)}` }));
}

// What a holder's field is called, for who hears its notes without seeing where they stand.
function nameOf(holder) {
  const field = holder.closest(".field, section");
  return field?.querySelector("label, legend, h2")?.textContent ?? holder.dataset.messages;
}

function summarise(listed) {
  const worth = listed.filter(({ message, holder }) => message.severity !== "note" || !holder);
  fill(byId("general"), ...worth.map(({ message, holder }) => {
    const found = box(message, link(message, holder));
    // A key that no field shows can still be taken out of the way.
    if (!holder && message.key && read("config", message.key) !== undefined) {
      found.append(action("Remove this key", () => { write("config", message.key, undefined); changed(null); }));
    }
    return found;
  }));
}

export function chipsOf(data) {
  const count = (severity) => data.messages.filter((message) => message.severity === severity).length;
  const chips = ["error", "warning"]
    .filter((severity) => count(severity))
    .map((severity) => [severity, `${count(severity)} ${severity}${count(severity) > 1 ? "s" : ""}`]);
  if (data.runs) chips.unshift(["good", "can run"]);
  const full = (data.memory.bars ?? []).filter((bar) => !bar.fits).map((bar) => bar.label);
  if (full.length) chips.push(["error", `does not fit ${full.join(", ")}`]);
  return chips;
}

export function renderCounts(chips) {
  fill(byId("counts"), ...chips.map(([severity, text]) => el("span", { class: "count", "data-severity": severity, text })));
}

function link(message, holder) {
  if (!message.key) return null;
  const control = holder && controlOf(holder);
  if (!control) return el("code", { text: `${message.key}: ` });
  const anchor = el("a", { href: `#${control.id}`, text: message.key, onclick: (event) => {
    event.preventDefault();
    control.closest("details")?.setAttribute("open", "");
    control.focus();
    control.scrollIntoView({ block: "center" });
  } });
  return el("span", {}, anchor, ": ");
}

export function renderTitle(data) {
  const title = byId("title");
  title.textContent = data.title ?? (data.valid ? "This plan cannot run as it is." : "This is not a plan yet.");
  show(title, true);
}
