(() => {
  "use strict";
  const root = document.documentElement;

  // -- light and dark
  const wanted = matchMedia("(prefers-color-scheme: dark)");
  const toggle = document.getElementById("theme");
  const theme = (dark) => {
    root.dataset.theme = dark ? "dark" : "light";
    toggle.textContent = dark ? "Light" : "Dark";
    toggle.setAttribute("aria-label", dark ? "Switch to light colours" : "Switch to dark colours");
  };
  toggle.hidden = false;
  toggle.addEventListener("click", () => theme(root.dataset.theme !== "dark"));
  wanted.addEventListener("change", (event) => theme(event.matches));
  theme(wanted.matches);

  // -- copy
  const said = document.getElementById("said");
  const copied = async (text) => {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      const area = document.createElement("textarea");
      area.value = text;
      document.body.append(area);
      area.select();
      const done = document.execCommand("copy");
      area.remove();
      return done;
    }
  };
  for (const button of document.querySelectorAll("button.copy")) {
    button.addEventListener("click", async () => {
      const done = await copied(button.parentElement.querySelector("code").textContent);
      button.textContent = done ? "Copied" : "Select and copy";
      button.classList.toggle("done", done);
      said.textContent = done ? "Copied" : "Could not copy";
      setTimeout(() => { button.textContent = "Copy"; button.classList.remove("done"); }, 2000);
    });
  }

  // -- the section that is in view
  const links = new Map(Array.from(document.querySelectorAll("nav a"), (a) => [a.hash.slice(1), a]));
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (entry.isIntersecting) {
        for (const link of links.values()) link.removeAttribute("aria-current");
        const link = links.get(entry.target.id);
        if (!link) continue;
        link.setAttribute("aria-current", "true");
        // In view within the row of links; the page itself stays where it is.
        const row = link.closest("ul");
        row.scrollLeft = link.offsetLeft - row.offsetLeft - (row.clientWidth - link.offsetWidth) / 2;
      }
    }
  }, { rootMargin: "-10% 0px -80% 0px" });
  for (const card of document.querySelectorAll("section.card")) seen.observe(card);

  // -- charts. Texts go in as text, never as markup.
  const data = document.getElementById("charts");
  if (!data) return;
  const tip = document.getElementById("tip");
  const hover = (handler, event, item, value) => {
    const rows = value && value.tip;
    if (!rows) { tip.hidden = true; return; }
    const title = document.createElement("b");
    title.textContent = rows[0][0];
    tip.replaceChildren(title, ...rows.slice(1).map(([label, text]) => {
      const row = document.createElement("div");
      for (const part of [label, text]) {
        const cell = document.createElement("span");
        cell.textContent = part;
        row.append(cell);
      }
      return row;
    }));
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    const right = event.clientX + 16 + width > innerWidth - 8;
    const left = right ? Math.max(8, event.clientX - 16 - width) : event.clientX + 16;
    const top = Math.min(Math.max(8, event.clientY + 14), innerHeight - height - 8);
    tip.style.left = `${left}px`;
    tip.style.top = `${Math.max(8, top)}px`;
  };
  addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
  addEventListener("keydown", (event) => { if (event.key === "Escape") tip.hidden = true; });

  const specs = JSON.parse(data.textContent);
  const options = {
    renderer: "svg", actions: false, ast: true, defaultStyle: false, tooltip: hover,
    logLevel: 2, loader: { load: async () => { throw new Error("nothing is loaded"); } },
  };
  const draw = async (place) => {
    const number = Number(place.dataset.chart);
    place.replaceChildren();
    try {
      await vegaEmbed(place, specs[number], options);
      // One image with a name; its parts are in the table below it.
      const image = place.querySelector("svg");
      image.setAttribute("role", "img");
      image.setAttribute("aria-label", specs[number].description);
      for (const part of image.children) part.setAttribute("aria-hidden", "true");
      place.dataset.drawn = "yes";
    } catch (error) {
      place.dataset.drawn = "no";
      console.error(`chart ${number}: ${error}`);
    }
  };
  const all = Array.from(document.querySelectorAll("[data-chart]"));
  all.reduce((before, place) => before.then(() => draw(place)), Promise.resolve())
    .then(() => { root.dataset.charts = "drawn"; });
})();
