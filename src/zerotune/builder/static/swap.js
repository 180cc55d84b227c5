// Puts the server's HTML into the page: each element replaces the content of the one with its id.

import { all, byId, reach, show } from "./dom.js";

export function swap(html) {
  const template = document.createElement("template");
  template.innerHTML = html;
  for (const part of template.content.children) {
    const target = byId(part.id);
    const { shape } = target.dataset;
    Object.assign(target.dataset, part.dataset);
    // Somebody may be typing in a part of the same shape, or have unfolded equal notes. The choice in
    // a list is part of the form, so lists are always replaced.
    const same = shape ? shape === part.dataset.shape : target.innerHTML === part.innerHTML;
    const { value } = part;
    if (!same || target.tagName === "SELECT") target.replaceChildren(...part.childNodes);
    if (target.tagName === "SELECT") target.value = value;
  }
  const hidden = JSON.parse(byId("hidden").dataset.paths);
  for (const one of all("[data-field]")) show(one, !hidden.includes(one.dataset.field));
  for (const messages of all(".field > .messages")) {
    const wrong = messages.querySelector(":scope > [data-severity=error]");
    controlOf(messages)?.[wrong ? "setAttribute" : "removeAttribute"]("aria-invalid", "true");
  }
}

export const controlOf = (inside) =>
  inside?.closest(".field")?.querySelector("input:not([type=radio]), select, input:checked, input");

// A link to messages leads to their control.
document.addEventListener("click", (event) => {
  const link = event.target.closest(".index a");
  const control = link && controlOf(document.querySelector(link.hash));
  if (!control) return;
  event.preventDefault();
  reach(control);
});
