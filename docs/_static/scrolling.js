// What is wider than the page scrolls inside it, by keyboard too, under a name of its own.
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

addEventListener("DOMContentLoaded", () => {
  const sizes = new ResizeObserver((entries) => entries.forEach((one) => reach(one.target)));
  // A folded table has its size once it is unfolded.
  document.querySelectorAll(WIDE).forEach((element) => sizes.observe(element));
});
