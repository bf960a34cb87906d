"use strict";
(() => {
  const dark = JSON.parse(document.getElementById("dark-colours").textContent);
  const scheme = window.matchMedia("screen and (prefers-color-scheme: dark)");
  const narrow = window.matchMedia("(max-width: 640px)");

  const PAPER = 680; // pixels of a chart on A4
  let printing = false;

  const ZOOM = ["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"];

  // Figures are written in the colours of light ground; on dark ground each has its sibling.
  const coloured = (value) => {
    if (typeof value === "string") return (scheme.matches && !printing && dark[value]) || value;
    if (Array.isArray(value)) return value.map(coloured);
    if (value && typeof value === "object") {
      const copy = {};
      for (const key of Object.keys(value)) copy[key] = coloured(value[key]);
      return copy;
    }
    return value;
  };

  // On a phone the names stand in two columns, long ones in one.
  const legendOf = (data) => {
    const names = data.filter((trace) => trace.showlegend !== false).map((trace) => trace.name);
    const columns = names.some((name) => name && name.length > 16) ? 1 : 2;
    return { columns, rows: Math.ceil(names.length / columns) };
  };

  // What all figures share; a figure's own words go before it.
  const template = () => {
    const style = getComputedStyle(document.body);
    const [ink, card, line, frame, soft] = ["ink", "card", "line", "frame", "soft"].map((name) =>
      style.getPropertyValue(`--${name}`).trim());
    const title = { standoff: 8, font: { size: 13 } };
    const lines = { gridcolor: line, showline: true, linecolor: frame, zerolinecolor: line };
    const axis = { title, ...lines, automargin: true };
    return {
      layout: {
        paper_bgcolor: card,
        plot_bgcolor: "rgba(0,0,0,0)",
        font: { family: style.fontFamily, size: narrow.matches ? 11 : 13, color: ink },
        margin: { l: 12, r: 16, t: 16, b: 12 },
        legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", xanchor: "left" },
        hoverlabel: { bgcolor: soft, bordercolor: frame, font: { color: ink } },
        hovermode: "closest",
        dragmode: false,
        modebar: { bgcolor: "rgba(0,0,0,0)", color: frame, activecolor: ink },
        shapedefaults: { line: { color: frame, width: 1.5, dash: "dot" } },
        annotationdefaults: { font: { size: 12, color: ink }, showarrow: false },
        xaxis: axis,
        yaxis: axis,
      },
      data: {
        bar: [{ marker: { line: { color: card, width: 0.5 } } }],
        scatter: [{ line: { width: 2.2 } }],
        heatmap: [{ textfont: { size: 12 } }],
      },
    };
  };

  const fitted = (figure, holder) => {
    const made = coloured(figure);
    made.layout.template = template();
    if (printing && !holder.classList.contains("square")) made.layout.width = PAPER;
    if (narrow.matches) {
      made.layout.dragmode = false; // a finger scrolls the page
      // Lines are named by the legend: beside them is no room.
      const others = (made.layout.annotations || []).filter((one) => one.name !== "line");
      if (others.length < (made.layout.annotations || []).length) {
        Object.assign(made.layout, { annotations: others, margin: {}, showlegend: true });
      }
      const ticks = made.layout.xaxis.ticktext;
      if (ticks && ticks.length > 6) {
        made.layout.xaxis.ticktext = ticks.map((text, place) => (place % 2 ? "" : text));
      }
      const { columns, rows } = legendOf(made.data);
      if (made.data.length > 4 && made.data[0].type !== "heatmap") {
        const entrywidth = 1 / columns;
        const more = { entrywidthmode: "fraction", entrywidth, maxheight: 19 * rows + 20 };
        made.layout.legend = Object.assign(made.layout.legend || {}, { ...more, font: { size: 10 } });
      }
    }
    return made;
  };

  const draw = (holder) => {
    const text = holder.parentElement.querySelector("script[type='application/json']").textContent;
    const { data, layout } = fitted(JSON.parse(text), holder);
    const rows = narrow.matches ? legendOf(data).rows : 0;
    if (holder.dataset.height) {
      holder.style.height = `${Number(holder.dataset.height) + 19 * Math.max(0, rows - 2)}px`;
    }
    const zoom = "zoom" in holder.dataset;
    const config = {
      responsive: true,
      displaylogo: false,
      displayModeBar: narrow.matches ? false : zoom || "hover",
      modeBarButtons: [...(zoom ? [ZOOM] : []), ["toImage"]],
      toImageButtonOptions: { filename: holder.id, scale: 2 },
    };
    return window.Plotly.react(holder, data, layout, config);
  };

  // A table's rows are shown as far as its columns, downward.
  const zoomed = (holder, button) => {
    const [from, to] = [Number(button.dataset.from), Number(button.dataset.to)];
    const square = holder.classList.contains("square");
    return { "xaxis.range": [from, to], ...(square ? { "yaxis.range": [to, from] } : {}) };
  };

  // Those that are shown: of closed details none.
  const holders = () => [...document.querySelectorAll(".plot")].filter((one) => one.offsetParent);
  const drawAll = () => {
    const drawn = holders().map(draw);
    Promise.all(drawn).then(() => {
      for (const button of document.querySelectorAll("button[data-from]:first-child")) {
        const holder = document.getElementById(button.dataset.figure);
        if (!holder.classList.contains("square")) {
          window.Plotly.relayout(holder, zoomed(holder, button));
        }
      }
      document.documentElement.dataset.ready = "yes";
    });
  };

  for (const button of document.querySelectorAll("button[data-from]")) {
    button.addEventListener("click", () => {
      const holder = document.getElementById(button.dataset.figure);
      window.Plotly.relayout(holder, zoomed(holder, button));
    });
  }
  for (const details of document.querySelectorAll("details.more")) {
    details.addEventListener("toggle", drawAll);
  }
  const print = (now) => () => {
    printing = now;
    drawAll();
  };
  window.addEventListener("beforeprint", print(true));
  window.addEventListener("afterprint", print(false));
  scheme.addEventListener("change", drawAll);
  narrow.addEventListener("change", drawAll);
  drawAll();
})();
