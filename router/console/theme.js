// Runs before the first paint: the chosen theme, or the system's.
const chosen = localStorage.getItem("loraplex.theme");
if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
