"use strict";
(() => {
  const dark = JSON.parse(document.getElementById("dark-colours").textContent);
  const scheme = window.matchMedia("screen and (prefers-color-scheme: dark)");
  const narrow = window.matchMedia("(max-width: 640px)");

  const PAPER = 680, PAGE = 780; // pixels of a chart on A4: its width, and the most of its height
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

  // Names stand in columns: on a phone in two, long ones in one; else as many as there is room for.
  const legendOf = (data, width) => {
    const names = data.filter((trace) => trace.showlegend !== false).map((trace) => trace.name);
    const longest = Math.max(0, ...names.map((name) => (name || "").length));
    const columns = narrow.matches
      ? longest > 12 ? 1 : 2
      : Math.max(1, Math.floor((0.8 * width) / (55 + 7 * longest)));
    return { columns, rows: Math.ceil(names.length / columns) };
  };
  const widthOf = (holder) => (printing ? PAPER : holder.clientWidth);

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

  const rowsOf = ({ data, layout }, holder) =>
    layout.showlegend === false ? 0 : legendOf(data, widthOf(holder)).rows;

  const fitted = (figure, holder) => {
    const made = coloured(figure);
    made.layout.template = template();
    if (printing && !holder.classList.contains("square")) {
      Object.assign(made.layout, { width: PAPER, height: parseInt(holder.style.height, 10) });
    }
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
      const { columns, rows } = legendOf(made.data, widthOf(holder));
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
    const figure = JSON.parse(text);
    if (holder.dataset.height) {
      const height = Number(holder.dataset.height) + 19 * Math.max(0, rowsOf(figure, holder) - 2);
      holder.style.height = `${printing ? Math.min(height, PAGE) : height}px`;
    }
    const { data, layout } = fitted(figure, holder);
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
    drawAll(); // the second time with the margins that the first has found
  };
  window.addEventListener("beforeprint", print(true));
  window.addEventListener("afterprint", print(false));
  scheme.addEventListener("change", drawAll);
  narrow.addEventListener("change", drawAll);
  drawAll();
})();
