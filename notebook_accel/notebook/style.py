"""The style sheet of the live panel: it follows the theme of JupyterLab and of VS Code."""

from __future__ import annotations

__all__ = ["STYLE"]

# Columns and the output area have fixed sizes, and digits one width, so that nothing jumps.
STYLE = """<style>
.na-panel {
  --na-fg: var(--jp-ui-font-color1, var(--vscode-editor-foreground, #222));
  --na-back: var(--jp-layout-color1, var(--vscode-editor-background, Canvas));
  --na-muted: var(--jp-ui-font-color2, var(--vscode-descriptionForeground, #717171));
  --na-line: var(--jp-border-color2, var(--vscode-panel-border, rgba(128,128,128,.35)));
  --na-soft: var(--jp-layout-color2, var(--vscode-textCodeBlock-background,
    rgba(128,128,128,.12)));
  --na-brand: var(--jp-brand-color1, var(--vscode-progressBar-background, #2196f3));
  --na-good: var(--jp-success-color1, var(--vscode-testing-iconPassed, #388e3c));
  --na-warn: var(--jp-warn-color1, var(--vscode-editorWarning-foreground, #b7791f));
  --na-bad: var(--jp-error-color1, var(--vscode-errorForeground, #d32f2f));
  --na-mono: var(--jp-code-font-family, var(--vscode-editor-font-family, monospace));
  position: relative; overflow: hidden; max-width: 1000px; margin: 4px 0;
  border: 1px solid var(--na-line); border-radius: 8px;
}
.na-panel > .widget-html, .na-panel .widget-html-content { margin: 0; width: 100%; }
.na { color: var(--na-fg); font-size: 13px; line-height: 1.4; container-type: inline-size;
  font-family: var(--jp-ui-font-family, var(--vscode-font-family, system-ui, sans-serif));
  font-variant-numeric: tabular-nums; }
.na-muted { color: var(--na-muted); }
.na-title { display: flex; align-items: center; gap: 10px; height: 44px;
  padding: 0 104px 0 14px; white-space: nowrap; overflow: hidden;
  border-bottom: 1px solid var(--na-line); }
.na-title b { font-size: 14px; font-family: var(--na-mono); overflow: hidden;
  text-overflow: ellipsis; }
.na-dot { flex: none; width: 9px; height: 9px; border-radius: 50%;
  background: var(--na-brand); }
.na-clock { min-width: 4em; }
span.na-succeeded, td.na-succeeded { color: var(--na-good); }
span.na-failed, td.na-failed { color: var(--na-bad); }
span.na-stopped, td.na-stopped, span.na-stopping { color: var(--na-warn); }
td.na-starting, span.na-starting { color: var(--na-muted); }
.na-dot.na-starting { background: var(--na-muted); }
.na-dot.na-stopping, .na-dot.na-stopped { background: var(--na-warn); }
.na-dot.na-failed { background: var(--na-bad); }
.na-dot.na-succeeded { background: var(--na-good); }
table.na-ranks { table-layout: fixed; width: calc(100% - 28px); margin: 8px 14px 10px;
  border-collapse: collapse; border: none; font-size: 13px; }
.na-ranks th { font-weight: normal; font-size: 11px; color: var(--na-muted); text-align: left;
  padding: 0 8px 2px 0; border: none; }
.na-ranks td { height: 26px; padding: 0 10px 0 0; border: none; text-align: left;
  white-space: nowrap; overflow: hidden; text-overflow: ellipsis; }
.na-ranks tr { background: none; }
.na-c-rank { width: 36px; } .na-c-state { width: 68px; } .na-c-label { width: 150px; }
.na-c-count { width: 104px; } .na-c-rate { width: 92px; } .na-c-left { width: 52px; }
.na-c-memory { width: 62px; }
.na-ranks .na-c-count, .na-ranks .na-c-rate, .na-ranks .na-c-left, .na-ranks .na-c-memory {
  text-align: right; }
.na-ranks td.na-c-memory, .na-ranks th.na-c-memory { padding-right: 0; }
.na-ranks td.na-c-label { font-size: 12px; }
.na-ranks td.na-c-label, .na-ranks td.na-c-left, .na-ranks td.na-c-memory {
  color: var(--na-muted); }
@container (max-width: 760px) { .na-c-label { width: 104px; } .na-c-count { width: 80px; } }
@container (max-width: 620px) { .na-c-label { display: none; } }
@container (max-width: 520px) { .na-c-memory { display: none; } }
.na progress { appearance: none; -webkit-appearance: none; display: block; width: 100%;
  height: 8px; border: none; border-radius: 4px; overflow: hidden;
  background: var(--na-soft); color: var(--na-brand); }
.na progress::-webkit-progress-bar { background: var(--na-soft); }
.na progress::-webkit-progress-value { background: var(--na-brand); border-radius: 4px;
  transition: width .2s linear; }
.na progress::-moz-progress-bar { background: var(--na-brand); border-radius: 4px; }
.na progress.na-succeeded::-webkit-progress-value { background: var(--na-good); }
.na progress.na-succeeded::-moz-progress-bar { background: var(--na-good); }
.na progress.na-failed::-webkit-progress-value { background: var(--na-bad); }
.na progress.na-failed::-moz-progress-bar { background: var(--na-bad); }
.na progress.na-stopped::-webkit-progress-value { background: var(--na-warn); }
.na progress.na-stopped::-moz-progress-bar { background: var(--na-warn); }
.na-strip { display: flex; flex-wrap: wrap; gap: 3px; margin: 2px 14px 6px; }
.na-strip i { width: 11px; height: 16px; border-radius: 2px;
  background: linear-gradient(to top, var(--na-c, var(--na-brand)) var(--f, 0%),
    var(--na-soft) var(--f, 0%)); }
.na-strip i.na-succeeded { --na-c: var(--na-good); --f: 100%; }
.na-strip i.na-failed { --na-c: var(--na-bad); --f: 100%; }
.na-strip i.na-stopped { --na-c: var(--na-warn); }
.na-fold { margin: 0 14px 10px; }
.na-metrics { display: flex; flex-wrap: wrap; gap: 4px 26px; padding: 8px 14px;
  border-top: 1px solid var(--na-line); }
.na-metric { display: flex; align-items: center; gap: 8px; height: 24px; white-space: nowrap; }
.na-metric b { min-width: 4.2em; font-weight: 600; }
.na-metric svg { color: var(--na-brand); }
.na-spread { font-size: 11px; }
.na-notices { padding: 6px 14px; border-top: 1px solid var(--na-line); color: var(--na-warn); }
.na pre { font-family: var(--na-mono); font-size: 12px; line-height: 18px; margin: 0;
  padding: 0; background: none; color: inherit; white-space: pre-wrap; word-break: break-word; }
.na pre.na-error { padding: 8px 14px; max-height: 260px; overflow: auto; color: var(--na-bad);
  border-top: 1px solid var(--na-line); }
.na-log-title { height: 34px; line-height: 34px; padding: 0 14px; font-size: 11px;
  border-top: 1px solid var(--na-line); }
.na-log { height: 136px; overflow: auto; padding: 0 14px 8px; display: grid; gap: 6px 18px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 380px), 1fr));
  grid-auto-rows: minmax(38px, 1fr); }
.na-block { display: flex; gap: 8px; min-height: 0; min-width: 0; }
.na-block > div { flex: 1; min-width: 0; overflow: auto; display: flex;
  flex-direction: column-reverse; }
.na-block pre { margin-bottom: auto; flex: none; overflow: visible; }
.na-tag { flex: none; min-width: 22px; height: 18px; font: 11px/18px var(--na-mono);
  text-align: center; border-radius: 4px; background: var(--na-soft); color: var(--na-muted); }
.na-stop, .na-filter { position: absolute; margin: 0; }
.na-stop { top: 8px; right: 14px; width: 82px; height: 28px; line-height: 26px;
  border: 1px solid var(--na-line); border-radius: 6px; background: transparent;
  color: var(--na-bad); font-size: 13px; }
.na-stop:hover:enabled { background: var(--na-bad); color: #fff; }
.na-stop:disabled { color: var(--na-muted); opacity: .8; }
.na-filter { right: 14px; bottom: 147px; width: 110px; height: 28px; }
.na-filter select { border: 1px solid var(--na-line); border-radius: 6px; padding: 0 4px;
  appearance: auto; -webkit-appearance: auto; background: var(--na-back); color: var(--na-fg); }
</style>"""
