// What the theme leaves to do: names of landmarks, and tables that scroll by keyboard.
"use strict";

const WIDE = ".table-wrapper, .math-wrapper, .highlight pre";

function headingBefore(element) {
  const section = element.closest("section");
  const heading = section?.querySelector("h1, h2, h3, h4");
  return heading?.firstChild?.textContent ?? document.title;
}

function reach(element) {
  if (element.scrollWidth <= element.clientWidth) {
    for (const name of ["tabindex", "role", "aria-label"]) element.removeAttribute(name);
    return;
  }
  element.tabIndex = 0;
  element.setAttribute("role", "group");
  const kind = element.matches("pre") ? "Code" : "Table";
  element.setAttribute("aria-label", `${kind} that scrolls: ${headingBefore(element)}`);
}

function name(selector, label, role) {
  for (const element of document.querySelectorAll(selector)) {
    element.setAttribute("aria-label", label);
    if (role) element.setAttribute("role", role);
  }
}

addEventListener("DOMContentLoaded", () => {
  name(".sidebar-drawer", "All pages");
  name(".toc-drawer", "On this page");
  name(".content-icon-container", "This page", "navigation");
  const article = document.querySelector("article");
  if (article && !article.querySelector("h1")) {
    article.insertAdjacentHTML("afterbegin", "<h1>Search</h1>");
  }
  const sizes = new ResizeObserver((entries) => entries.forEach((one) => reach(one.target)));
  // A folded table has its size once it is unfolded.
  for (const element of document.querySelectorAll(WIDE)) {
    // The observer answers a frame later, when a reader may be here already.
    reach(element);
    sizes.observe(element);
  }
});
