//! Small plots as self-contained SVG files: bars with ranges, and lines.

use std::fmt::Write;

const WIDTH: f64 = 900.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 80.0;
const RIGHT: f64 = 190.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 60.0;
/// Colours that are distinguishable with colour blindness, too (Okabe and Ito).
const COLOURS: [&str; 8] = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#f0e442",
];

/// An axis of values.
#[derive(Clone, Debug, PartialEq)]
pub struct Axis {
    /// What it shows, with the unit.
    pub label: String,
    /// Whether steps are factors of ten. Zero and less are then drawn at the lower end.
    pub logarithmic: bool,
    /// The lowest value shown.
    pub from: f64,
    /// The highest value shown, above `from`.
    pub to: f64,
}

impl Axis {
    /// The relative position of a value on the axis, 0 to 1.
    fn place(&self, value: f64) -> f64 {
        let place = if self.logarithmic {
            let (from, to) = (self.from.log10(), self.to.log10());
            (value.max(self.from).log10() - from) / (to - from)
        } else {
            (value - self.from) / (self.to - self.from)
        };
        place.clamp(0.0, 1.0)
    }

    fn ticks(&self) -> Vec<f64> {
        if self.logarithmic {
            let (from, to) = (self.from.log10().round(), self.to.log10().round());
            (from as i32..=to as i32)
                .map(|power| 10_f64.powi(power))
                .collect()
        } else {
            (0..=5)
                .map(|step| self.from + f64::from(step) / 5.0 * (self.to - self.from))
                .collect()
        }
    }
}

/// One line, or the bars of one colour.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    /// Its name in the legend.
    pub name: String,
    /// Points (x, y) of a line; for bars (group, height).
    pub points: Vec<(f64, f64)>,
    /// Lowest and highest value of each bar, if any.
    pub ranges: Vec<(f64, f64)>,
}

/// Groups of bars.
#[derive(Clone, Debug, PartialEq)]
pub struct Bars {
    /// The title.
    pub title: String,
    /// Names of the groups.
    pub groups: Vec<String>,
    /// The axis of values.
    pub y: Axis,
    /// The series, each with one bar per group; the first number of a point is the index of the group.
    pub series: Vec<Series>,
}

/// Lines over a numeric axis.
#[derive(Clone, Debug, PartialEq)]
pub struct Lines {
    /// The title.
    pub title: String,
    /// The horizontal axis.
    pub x: Axis,
    /// The vertical axis.
    pub y: Axis,
    /// The lines.
    pub series: Vec<Series>,
}

fn x_at(place: f64) -> f64 {
    LEFT + place * (WIDTH - LEFT - RIGHT)
}

fn y_at(place: f64) -> f64 {
    HEIGHT - BOTTOM - place * (HEIGHT - TOP - BOTTOM)
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

/// Parts of a picture. Writing to a `String` cannot fail, so results are dropped.
struct Picture(String);

impl Picture {
    fn new(title: &str) -> Self {
        let mut picture = Self(format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
             font-family=\"sans-serif\" font-size=\"13\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
        ));
        picture.text(x_at(0.5), TOP - 16.0, "middle", title);
        picture
    }

    fn text(&mut self, x: f64, y: f64, anchor: &str, text: &str) {
        let text = escaped(text);
        let _ = writeln!(
            self.0,
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{text}</text>"
        );
    }

    fn line(&mut self, (x1, y1): (f64, f64), (x2, y2): (f64, f64), colour: &str) {
        let _ = writeln!(
            self.0,
            "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"{colour}\"/>"
        );
    }

    fn rectangle(&mut self, x: f64, y: f64, width: f64, height: f64, colour: &str) {
        let _ = writeln!(
            self.0,
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" \
             fill=\"{colour}\"/>"
        );
    }

    fn y_axis(&mut self, axis: &Axis) {
        for tick in axis.ticks() {
            let y = y_at(axis.place(tick));
            self.line((x_at(0.0), y), (x_at(1.0), y), "#dddddd");
            self.text(LEFT - 8.0, y + 4.0, "end", &short(tick));
        }
        let (x, y) = (18.0, y_at(0.5));
        let label = escaped(&axis.label);
        let _ = writeln!(
            self.0,
            "<text x=\"{x}\" y=\"{y}\" text-anchor=\"middle\" \
             transform=\"rotate(-90 {x} {y})\">{label}</text>"
        );
    }

    fn legend(&mut self, series: &[Series]) {
        for (number, one) in series.iter().enumerate() {
            let y = TOP + 20.0 * number as f64;
            let x = WIDTH - RIGHT + 16.0;
            self.rectangle(x, y, 12.0, 12.0, COLOURS[number % COLOURS.len()]);
            self.text(x + 18.0, y + 11.0, "start", &one.name);
        }
    }

    fn finish(mut self) -> String {
        self.0.push_str("</svg>\n");
        self.0
    }
}

fn short(value: f64) -> String {
    let text = format!("{value:.6}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    text.to_owned()
}

impl Bars {
    /// Renders the plot.
    #[must_use]
    pub fn to_svg(&self) -> String {
        let mut picture = Picture::new(&self.title);
        picture.y_axis(&self.y);
        let group_width = (x_at(1.0) - x_at(0.0)) / self.groups.len().max(1) as f64;
        let bar_width = 0.8 * group_width / self.series.len().max(1) as f64;
        for (number, name) in self.groups.iter().enumerate() {
            let middle = x_at(0.0) + group_width * (number as f64 + 0.5);
            picture.text(middle, y_at(0.0) + 20.0, "middle", name);
        }
        for (number, one) in self.series.iter().enumerate() {
            let colour = COLOURS[number % COLOURS.len()];
            for (bar, &(group, height)) in one.points.iter().enumerate() {
                let left = x_at(0.0) + group_width * (group + 0.1) + bar_width * number as f64;
                let top = y_at(self.y.place(height));
                picture.rectangle(left, top, bar_width, y_at(0.0) - top, colour);
                if let Some(&(low, high)) = one.ranges.get(bar) {
                    let middle = left + bar_width / 2.0;
                    let (low, high) = (y_at(self.y.place(low)), y_at(self.y.place(high)));
                    picture.line((middle, low), (middle, high), "#000000");
                }
            }
        }
        picture.legend(&self.series);
        picture.finish()
    }
}

impl Lines {
    /// Renders the plot.
    #[must_use]
    pub fn to_svg(&self) -> String {
        let mut picture = Picture::new(&self.title);
        picture.y_axis(&self.y);
        for tick in self.x.ticks() {
            let x = x_at(self.x.place(tick));
            picture.line((x, y_at(0.0)), (x, y_at(0.0) + 5.0), "#000000");
            picture.text(x, y_at(0.0) + 20.0, "middle", &short(tick));
        }
        picture.text(x_at(0.5), HEIGHT - 14.0, "middle", &self.x.label);
        for (number, one) in self.series.iter().enumerate() {
            let points: Vec<String> = one
                .points
                .iter()
                .map(|&(x, y)| {
                    let (x, y) = (x_at(self.x.place(x)), y_at(self.y.place(y)));
                    format!("{x:.1},{y:.1}")
                })
                .collect();
            let _ = writeln!(
                picture.0,
                "<polyline fill=\"none\" stroke-width=\"2\" stroke=\"{}\" points=\"{}\"/>",
                COLOURS[number % COLOURS.len()],
                points.join(" ")
            );
        }
        picture.legend(&self.series);
        picture.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plots_are_closed_and_keep_values_inside() {
        let y = Axis {
            label: "lost <blocks>".into(),
            logarithmic: true,
            from: 0.1,
            to: 1_000.0,
        };
        let series = vec![Series {
            name: "stock & 3".into(),
            points: vec![(0.0, 0.0), (1.0, 1e9)],
            ranges: vec![(0.0, 1.0), (5.0, 1e9)],
        }];
        let bars = Bars {
            title: "t".into(),
            groups: vec!["dc0".into(), "dc1".into()],
            y: y.clone(),
            series: series.clone(),
        };
        let x = Axis {
            logarithmic: false,
            from: 0.0,
            to: 1.0,
            ..y.clone()
        };
        let title = "t".to_owned();
        let lines = Lines {
            title,
            x,
            y,
            series,
        };
        for plot in [bars.to_svg(), lines.to_svg()] {
            assert!(plot.starts_with("<svg") && plot.ends_with("</svg>\n"));
            assert!(plot.contains("lost &lt;blocks&gt;") && plot.contains("stock &amp; 3"));
            assert!(!plot.contains("NaN") && !plot.contains("inf"));
        }
    }
}
