"use strict";
// Sorting by any column, hiding runs, and saying which tables are wider than the page. It is complete without them.
for (const table of document.querySelectorAll("table.sortable")) {
  table.querySelectorAll("thead th").forEach((head, column) => {
    const button = head.querySelector("button");
    if (!button) return;
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") !== "descending";
      const body = table.tBodies[0];
      const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();
      const compare = (a, b) => {
        const [x, y] = [value(a), value(b)];
        if (x === "" || y === "") return (x === "") - (y === "");
        const [p, q] = [Number(x), Number(y)];
        const order = Number.isNaN(p) || Number.isNaN(q) ? x.localeCompare(y, undefined, { numeric: true }) : p - q;
        return down ? -order : order;
      };
      for (const other of table.querySelectorAll("thead th")) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      [...body.rows].sort(compare).forEach((row) => body.append(row));
    });
  });
}
for (const box of document.querySelectorAll(".chooser input")) {
  const show = () => {
    for (const part of document.querySelectorAll(`[data-run="${box.value}"]`)) part.classList.toggle("off", !box.checked);
  };
  box.addEventListener("change", show);
  show(); // a browser may remember boxes over a reload
}
const measure = () => {
  for (const table of document.querySelectorAll(".scroll")) table.classList.toggle("wide", table.scrollWidth > table.clientWidth + 1);
};
addEventListener("resize", measure);
document.addEventListener("toggle", measure, true); // of what was folded
measure();
addEventListener("beforeprint", () => {
  for (const folded of document.querySelectorAll("details:not(.long)")) folded.open = true;
});
