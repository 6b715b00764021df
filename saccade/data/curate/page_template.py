"""The look of the inspection page: one style sheet and one Jinja2 template, autoescaped. No scripts, nothing from outside."""

STYLE = """
:root { color-scheme: light dark; --ground: #fcfcfb; --ink: #1d1d1f; --soft: #6b6b70; --line: #e3e3e1; --card: #ffffff; --kept: #2f6fab; --all: #c9d6e2; --drop: #b4532a; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #17181a; --ink: #ececea; --soft: #a0a1a6; --line: #303236; --card: #1f2124; --kept: #6fa8dc; --all: #3a4652; --drop: #e08a5f; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1180px; padding: 2.5rem 1.5rem 4rem; background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.5rem 0 .75rem; }
p { margin: .25rem 0; }
.soft { color: var(--soft); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
td, th { padding: .3rem .75rem .3rem 0; border-bottom: 1px solid var(--line); text-align: left; font-weight: normal; overflow-wrap: anywhere; }
th { color: var(--soft); }
td.number, th.number { text-align: right; white-space: nowrap; }
td.bar { width: 40%; }
svg { display: block; width: 100%; }
.left { fill: var(--kept); } .gone { fill: var(--drop); } .all { fill: var(--all); } .kept { fill: var(--kept); }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(260px, 1fr)); gap: 1rem; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .75rem; overflow: hidden; }
.card h3 { font-size: .9rem; margin: 0 0 .5rem; }
.card .soft { font-size: .8rem; overflow-wrap: anywhere; }
.ends { display: flex; justify-content: space-between; }
.pictures { display: flex; gap: .5rem; align-items: center; min-height: 4rem; }
.pictures img { max-width: 100%; max-height: 180px; min-width: 0; border-radius: 4px; background: var(--line); }
.pair img { max-width: 48%; }
.text { margin: .5rem 0 .25rem; max-height: 7.5em; overflow: auto; overflow-wrap: anywhere; white-space: pre-line; }
details { margin: 1rem 0; } summary { cursor: pointer; font-weight: 600; padding: .25rem 0; }
details[open] summary { margin-bottom: .75rem; }
"""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{{ policy }}">
<meta name="referrer" content="no-referrer">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ funnel.path }}</title>
<style>{{ style | safe }}</style>
</head>
<body>
<h1>{{ funnel.path }}</h1>
<p>{{ "{:,}".format(funnel.num_kept) }} of {{ "{:,}".format(funnel.num_samples) }} samples
{{ "kept" if funnel.is_curated else "readable; not curated yet" }}
<span class="soft">in {{ funnel.size }}</span></p>

<h2>Funnel</h2>
<table>
<tr><th>reason</th><th class="number">dropped</th><th class="number">left</th><th></th></tr>
<tr><td>all samples</td><td></td><td class="number">{{ "{:,}".format(funnel.num_samples) }}</td>
<td class="bar"><svg viewBox="0 0 1000 16" height="16" preserveAspectRatio="none"><rect class="left" width="1000" height="16"/></svg></td></tr>
{% for step in funnel.steps %}
<tr><td>{{ step.reason }}</td><td class="number">{{ "{:,}".format(step.num_dropped) }}</td><td class="number">{{ "{:,}".format(step.num_left) }}</td>
<td class="bar"><svg viewBox="0 0 1000 16" height="16" preserveAspectRatio="none">
<rect class="left" width="{{ 1000 * step.num_left / funnel.num_samples }}" height="16"/>
<rect class="gone" x="{{ 1000 * step.num_left / funnel.num_samples }}" width="{{ 1000 * step.num_dropped / funnel.num_samples }}" height="16"/>
</svg></td></tr>
{% endfor %}
</table>

{% for title, counts in (("Sources", funnel.sources), ("Licences", funnel.licences)) if counts %}
<h2>{{ title }}</h2>
<table>
<tr><th>name</th><th class="number">kept</th><th class="number">all</th></tr>
{% for name, (kept, total) in (counts.items() | list)[:20] %}
<tr><td><bdi>{{ name }}</bdi></td><td class="number">{{ "{:,}".format(kept) }}</td><td class="number">{{ "{:,}".format(total) }}</td></tr>
{% endfor %}
</table>
{% if counts | length > 20 %}<p class="soft">and {{ counts | length - 20 }} more</p>{% endif %}
{% endfor %}

<h2>Distributions</h2>
<p class="soft">Pale: all samples. Strong: those kept.</p>
<div class="cards">
{% for each in funnel.distributions %}
{% set top = [each.num_all | max, 1] | max %}
<div class="card"><h3>{{ each.name }}</h3>
<svg viewBox="0 0 {{ 10 * each.num_all | length }} 100" height="110" preserveAspectRatio="none">
{% for count in each.num_all %}<rect class="all" x="{{ 10 * loop.index0 }}" y="{{ 100 - 100 * count / top }}" width="9" height="{{ 100 * count / top }}"/>{% endfor %}
{% for count in each.num_kept %}<rect class="kept" x="{{ 10 * loop.index0 }}" y="{{ 100 - 100 * count / top }}" width="9" height="{{ 100 * count / top }}"/>{% endfor %}
</svg>
<div class="soft ends"><span>{{ "%.4g" | format(each.edges[0]) }}</span><span>{{ "%.4g" | format(each.edges[-1]) }}</span></div>
<p class="soft">{% if each.quantiles %}median {{ "%.4g" | format(each.quantiles[3]) }}; 1 % below {{ "%.4g" | format(each.quantiles[1]) }}, 1 % above {{ "%.4g" | format(each.quantiles[5]) }}{% else %}none kept{% endif %}</p>
</div>
{% endfor %}
</div>

<h2>Examples</h2>
{% for group in groups %}
<details{{ " open" if loop.index <= 2 }}>
<summary>{{ group.title }} <span class="soft">({{ "{:,}".format(group.num_samples) }})</span></summary>
<div class="cards">
{% for example in group.examples %}
<div class="card">
<div class="pictures{{ " pair" if example.pictures | length > 1 }}">
{% for picture in example.pictures %}<img alt="" src="{{ picture }}">{% else %}<span class="soft">no picture can be shown</span>{% endfor %}
</div>
<p class="text" dir="auto">{{ example.text }}</p>
<p class="soft"><bdi>{{ example.name }}</bdi></p>
{% for note in example.notes %}<p class="soft"><bdi>{{ note }}</bdi></p>{% endfor %}
</div>
{% endfor %}
</div>
</details>
{% endfor %}
</body>
</html>
"""
