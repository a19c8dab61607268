//! Draws charts as SVG: dots and lines over two axes, several charts in one picture.
//!
//! ```text
//!  Chart ┐            ┌──────────┬──────────┐
//!  Chart ├─▶ picture ─▶ chart    │ chart    │   COLUMNS side by side,
//!  Chart ┘            ├──────────┼──────────┤   one legend below; a name
//!                     │ legend              │   has one colour everywhere
//!                     └─────────────────────┘
//! ```
//!
//! It is written by hand, because it needs only lines, circles and text, less than a library's
//! interface.

use std::fmt::Write as _;

/// The number of charts side by side.
const COLUMNS: usize = 3;
/// The size of a chart, including its text.
const CHART: (f64, f64) = (320.0, 250.0);
/// The margins for text on the left, at the top, on the right and at the bottom.
const MARGIN: (f64, f64, f64, f64) = (52.0, 28.0, 14.0, 40.0);
/// The height of a line of the legend.
const LINE: f64 = 20.0;
/// The approximate number of intervals on an axis.
const TICKS: f64 = 5.0;
/// Colours that can be distinguished in print and with most kinds of colour blindness (Okabe and
/// Ito, 2008).
const COLOURS: [&str; 8] = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8a8a8a",
];

/// A series of points.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    /// The name in the legend.
    pub name: String,
    /// The points, in the units of the axes.
    pub points: Vec<(f64, f64)>,
    /// Whether a line connects the points, instead of a dot on each.
    pub line: bool,
}

impl Series {
    /// A series with a dot on each point.
    pub fn dots(name: &str, points: Vec<(f64, f64)>) -> Series {
        Series {
            name: name.to_owned(),
            points,
            line: false,
        }
    }

    /// A series with a line through the points.
    pub fn line(name: &str, points: Vec<(f64, f64)>) -> Series {
        Series {
            line: true,
            ..Series::dots(name, points)
        }
    }
}

/// Two axes, which begin at zero, and the series on them.
#[derive(Clone, Debug, PartialEq)]
pub struct Chart {
    /// The title above the chart.
    pub title: String,
    /// The label of the horizontal axis, with its unit.
    pub x: String,
    /// The label of the vertical axis, with its unit.
    pub y: String,
    /// The series; later ones are drawn over earlier ones.
    pub series: Vec<Series>,
}

/// One picture with all charts.
pub fn picture(charts: &[Chart]) -> String {
    let mut names: Vec<&str> = Vec::new();
    for series in charts.iter().flat_map(|chart| &chart.series) {
        if !names.contains(&series.name.as_str()) {
            names.push(&series.name);
        }
    }
    let columns = charts.len().clamp(1, COLUMNS);
    let rows = charts.len().div_ceil(columns);
    let legend_rows = names.len().div_ceil(columns);
    let width = CHART.0 * columns as f64;
    let height = CHART.1 * rows as f64 + LINE * (legend_rows as f64 + 0.5);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
         font-family=\"sans-serif\" font-size=\"11\">\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"#ffffff\"/>\n"
    );
    for (n, chart) in charts.iter().enumerate() {
        let (column, row) = (n % columns, n / columns);
        let _ = writeln!(
            svg,
            "<g transform=\"translate({} {})\">",
            CHART.0 * column as f64,
            CHART.1 * row as f64
        );
        put_chart(&mut svg, chart, &names);
        svg.push_str("</g>\n");
    }
    for (n, name) in names.iter().enumerate() {
        let x = CHART.0 * (n % columns) as f64 + MARGIN.0;
        let y = CHART.1 * rows as f64 + LINE * (n / columns) as f64 + LINE / 2.0;
        let _ = writeln!(
            svg,
            "<circle cx=\"{x}\" cy=\"{y}\" r=\"5\" fill=\"{}\"/>\
             <text x=\"{}\" y=\"{}\">{}</text>",
            colour(&names, name),
            x + 10.0,
            y + 4.0,
            escaped(&name.replace('_', " "))
        );
    }
    svg.push_str("</svg>\n");
    svg
}

fn put_chart(svg: &mut String, chart: &Chart, names: &[&str]) {
    let (left, top, right, bottom) = MARGIN;
    let (width, height) = (CHART.0 - left - right, CHART.1 - top - bottom);
    let points = || chart.series.iter().flat_map(|series| &series.points);
    let (x_step, x_end) = scale(points().map(|p| p.0).fold(0.0, f64::max));
    let (y_step, y_end) = scale(points().map(|p| p.1).fold(0.0, f64::max));
    let place = |(x, y): (f64, f64)| {
        let (x, y) = (left + width * x / x_end, top + height * (1.0 - y / y_end));
        (tenths(x), tenths(y))
    };
    let _ = writeln!(
        svg,
        "<text x=\"{left}\" y=\"{}\" font-weight=\"bold\">{}</text>",
        top - 10.0,
        escaped(&chart.title)
    );
    for (n, value) in ticks(x_step, x_end) {
        let (x, y) = place((value, 0.0));
        let _ = writeln!(
            svg,
            "<line x1=\"{x}\" y1=\"{top}\" x2=\"{x}\" y2=\"{y}\" stroke=\"{}\"/>\
             <text x=\"{x}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
            if n == 0 { "#404040" } else { "#e4e4e4" },
            y + 14.0,
            number(value, x_step)
        );
    }
    for (n, value) in ticks(y_step, y_end) {
        let (x, y) = place((0.0, value));
        let _ = writeln!(
            svg,
            "<line x1=\"{x}\" y1=\"{y}\" x2=\"{}\" y2=\"{y}\" stroke=\"{}\"/>\
             <text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>",
            left + width,
            if n == 0 { "#404040" } else { "#e4e4e4" },
            x - 5.0,
            y + 4.0,
            number(value, y_step)
        );
    }
    let _ = writeln!(
        svg,
        "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{}</text>\
         <text transform=\"translate(13 {}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
        left + width / 2.0,
        CHART.1 - 8.0,
        escaped(&chart.x),
        top + height / 2.0,
        escaped(&chart.y)
    );
    for series in &chart.series {
        let colour = colour(names, &series.name);
        let placed: Vec<(f64, f64)> = series.points.iter().map(|p| place(*p)).collect();
        if series.line {
            let path: Vec<String> = placed.iter().map(|(x, y)| format!("{x},{y}")).collect();
            let _ = writeln!(
                svg,
                "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.5\"/>",
                path.join(" ")
            );
        } else {
            for (x, y) in placed {
                let _ = writeln!(
                    svg,
                    "<circle cx=\"{x}\" cy=\"{y}\" r=\"5\" fill=\"{colour}\" fill-opacity=\"0.85\"/>"
                );
            }
        }
    }
}

/// The step between ticks, 1, 2 or 5 times a power of ten, and the end of the axis.
fn scale(most: f64) -> (f64, f64) {
    let most = if most > 0.0 { most * 1.05 } else { 1.0 };
    let raw = most / TICKS;
    let power = 10.0_f64.powf(raw.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .map(|factor| factor * power)
        .find(|step| *step >= raw * 0.999)
        .unwrap_or(10.0 * power);
    (step, (most / step).ceil() * step)
}

fn ticks(step: f64, end: f64) -> impl Iterator<Item = (usize, f64)> {
    let count = (end / step).round() as usize;
    (0..=count).map(move |n| (n, step * n as f64))
}

/// A number with as many decimal places as the step has.
fn number(value: f64, step: f64) -> String {
    let places = (-step.log10().floor()).max(0.0) as usize;
    format!("{value:.places$}")
}

fn tenths(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

fn colour<'a>(names: &[&str], name: &str) -> &'a str {
    let n = names.iter().position(|other| *other == name);
    COLOURS[n.unwrap_or(0) % COLOURS.len()]
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_end_above_all_points_at_a_round_number() {
        for (most, step, end) in [
            (9.0, 2.0, 10.0),
            (0.43, 0.1, 0.5),
            (1.0, 0.5, 1.5),
            (70.0, 20.0, 80.0),
        ] {
            let got = scale(most);
            assert!((got.0 - step).abs() < 1e-9, "{most}: {got:?}");
            assert!((got.1 - end).abs() < 1e-9, "{most}: {got:?}");
        }
        assert!(scale(0.0).1 > 0.0);
        assert_eq!(number(0.5, 0.1), "0.5");
        assert_eq!(number(40.0, 20.0), "40");
    }

    #[test]
    fn a_name_has_one_colour_and_one_line_of_the_legend() {
        let chart = |points| Chart {
            title: "a < b".to_owned(),
            x: "s".to_owned(),
            y: "Mb/s".to_owned(),
            series: vec![
                Series::dots("ours", points),
                Series::line("theirs", vec![(0.0, 1.0), (1.0, 2.0)]),
            ],
        };
        let svg = picture(&[chart(vec![(1.0, 2.0)]), chart(Vec::new())]);
        // Its dot, and that in the legend.
        assert_eq!(svg.matches(COLOURS[0]).count(), 2);
        assert_eq!(svg.matches("<polyline").count(), 2);
        assert_eq!(svg.matches(">ours<").count(), 1);
        assert_eq!(svg.matches("a &lt; b").count(), 2);
        let (open, close) = (svg.matches("<g ").count(), svg.matches("</g>").count());
        assert_eq!((open, close), (2, 2));
    }

    #[test]
    fn a_point_is_where_its_figures_are() {
        let chart = Chart {
            title: String::new(),
            x: String::new(),
            y: String::new(),
            series: vec![Series::dots("it", vec![(5.0, 0.0)])],
        };
        let (left, top, right, bottom) = MARGIN;
        // Half way to 10 on the horizontal axis, at the bottom of the vertical one.
        let x = left + (CHART.0 - left - right) * 5.0 / scale(5.0).1;
        let y = CHART.1 - bottom;
        let _ = top;
        let dot = format!("<circle cx=\"{}\" cy=\"{}\"", tenths(x), tenths(y));
        assert!(picture(&[chart]).contains(&dot), "{dot}");
    }
}
