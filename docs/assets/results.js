// The table of measurements: a click on a heading sorts it, a field above filters it. Without scripts it is a plain table.
document.addEventListener("DOMContentLoaded", () => {
  const table = document.querySelector("article table");
  if (!table || !location.pathname.endsWith("reference/results.html")) return;
  table.dataset.sortable = "";
  const body = table.tBodies[0];
  const field = document.createElement("input");
  field.type = "search";
  field.placeholder = "filter: H100, speedrun, current ...";
  field.setAttribute("aria-label", "Filter the measurements");
  field.className = "results-filter";
  (table.closest(".md-typeset__scrollwrap") || table).before(field);
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/);
    for (const row of body.rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
  });
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = document.createElement("button");
    button.textContent = head.textContent;
    head.replaceChildren(button);
    if (column === 0) head.setAttribute("aria-sort", "descending");
    button.addEventListener("click", () => {
      const descending = head.getAttribute("aria-sort") === "ascending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", descending ? "descending" : "ascending");
      const rows = [...body.rows].sort((a, b) => a.cells[column].textContent.localeCompare(b.cells[column].textContent));
      body.append(...(descending ? rows.reverse() : rows));
    });
  });
});
