// The choice of charts and of the window's length, kept in the page's address so that a link has it.

/** Read what the address says, and keep it there as it changes. `charts` gives those that there are. */
export class Choice {
  constructor(filter, select, count, charts) {
    [this.filter, this.select, this.count, this.charts] = [filter, select, count, charts];
    const told = new URLSearchParams(location.hash.slice(1));
    filter.value = told.get("show") ?? "";
    if ([...select.options].some((option) => option.value === told.get("seconds"))) select.value = told.get("seconds");
    filter.addEventListener("input", () => { this.apply(); this.#keep(); });
    select.addEventListener("change", () => this.#keep());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && event.target === filter) filter.blur();
      if (event.key !== "/" || event.target.closest("input, select")) return;
      event.preventDefault();
      filter.focus();
    });
  }

  /** Show the charts with any of the words in what is known of them. */
  apply() {
    const words = this.filter.value.toLowerCase().split(/[\s,]+/).filter(Boolean);
    let shown = 0;
    for (const chart of this.charts()) {
      chart.card.hidden = words.length > 0 && !words.some((word) => chart.text.includes(word));
      shown += !chart.card.hidden;
    }
    this.count.textContent = words.length ? `${shown} of ${this.charts().length}` : "";
  }

  #keep() {
    const told = new URLSearchParams();
    if (this.filter.value) told.set("show", this.filter.value);
    if (!this.select.selectedOptions[0].defaultSelected) told.set("seconds", this.select.value);
    history.replaceState(null, "", `${location.pathname}${location.search}${String(told) && `#${told}`}`);
  }
}
