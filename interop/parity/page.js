for (const heading of document.querySelectorAll("th")) {
  heading.title = "Sort";
  heading.addEventListener("click", () => {
    const body = heading.closest("table").tBodies[0], column = heading.cellIndex;
    const number = heading.classList.contains("number");
    const value = row => {
      const text = row.cells[column].textContent;
      return number ? (text === "inf" ? Infinity : text === "" ? -1 : parseFloat(text)) : text;
    };
    const sign = heading.dataset.sign = -(heading.dataset.sign || (number ? 1 : -1));
    const rows = [...body.rows].sort((a, b) => {
      const x = value(a), y = value(b);
      return x < y ? -sign : x > y ? sign : 0;
    });
    body.append(...rows);
  });
}
document.querySelector("input").addEventListener("input", event => {
  const words = event.target.value.toLowerCase().split(/\s+/);
  for (const row of document.querySelector("#all").tBodies[0].rows) {
    const text = row.textContent.toLowerCase();
    row.hidden = !words.every(word => text.includes(word));
  }
});
