for (const heading of document.querySelectorAll("th")) {
  heading.title = "Sort";
  heading.tabIndex = 0;
  heading.addEventListener("keydown", event => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    heading.click();
  });
  heading.addEventListener("click", () => {
    const body = heading.closest("table").tBodies[0], column = heading.cellIndex;
    const number = heading.classList.contains("number");
    const value = row => {
      const text = row.cells[column].textContent;
      if (!number) return text;
      const found = text === "inf" ? Infinity : parseFloat(text);
      return Number.isNaN(found) ? -Infinity : found;
    };
    const sign = heading.dataset.sign = -(heading.dataset.sign || (number ? 1 : -1));
    const rows = [...body.rows].sort((a, b) => {
      const x = value(a), y = value(b);
      return x < y ? -sign : x > y ? sign : 0;
    });
    body.append(...rows);
    for (const other of heading.parentElement.cells) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
  });
}
for (const input of document.querySelectorAll("input[type=search]")) {
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/);
    for (const row of input.nextElementSibling.querySelector("tbody").rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every(word => text.includes(word));
    }
  });
}
