//! Pictures: SVG text, drawn by hand.
//!
//! Owns axes, the page, and lines over logarithmic axes. Called by `bench --plot` and the simulation's maps. Refuses to judge what
//! it draws, scripts, and fonts from elsewhere. A page is opaque and its text has a colour, so a reader's dark
//! background changes nothing.

use std::fmt::Write;

/// Left, right, top, bottom of the axes of [`lines`].
pub(crate) const FRAME: [f64; 4] = [70.0, 640.0, 30.0, 480.0];
const WIDTH: f64 = 900.0;
const HEIGHT: f64 = 540.0;

/// Colours of lines, in turn; each is read on white.
pub(crate) const COLOURS: [&str; 10] = [
    "#0b6bcb", "#c8511b", "#1f8a4c", "#7d3ac1", "#a08200", "#c2185b", "#00838f", "#5d4037",
    "#455a64", "#9e9d24",
];

/// A logarithmic axis.
pub(crate) struct Axis {
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

impl Axis {
    /// From the power of `base` below the least to the one above the greatest.
    pub(crate) fn over(
        values: impl Iterator<Item = f64> + Clone,
        base: f64,
        from: f64,
        to: f64,
    ) -> Self {
        let least = values.clone().fold(f64::MAX, f64::min).max(1e-3);
        let greatest = values.fold(f64::MIN, f64::max).max(least);
        let low = base.powf(least.log(base).floor());
        let high = base.powf(greatest.log(base).ceil()).max(low * base);
        Self {
            low,
            high,
            from,
            to,
        }
    }

    /// From `low` to `high`, no further.
    pub(crate) const fn exactly(low: f64, high: f64, from: f64, to: f64) -> Self {
        Self {
            low,
            high,
            from,
            to,
        }
    }

    /// Where a value is, in user units.
    pub(crate) fn place(&self, value: f64) -> f64 {
        let share = (value.max(self.low) / self.low).ln() / (self.high / self.low).ln();
        self.from + share * (self.to - self.from)
    }

    fn ticks(&self, base: f64) -> Vec<f64> {
        let steps = (self.high / self.low).log(base).round() as i32;
        (0..=steps).map(|step| self.low * base.powi(step)).collect()
    }
}

/// "42 KiB" of bytes.
pub(crate) fn bytes(value: f64) -> String {
    match value {
        value if value >= 1_048_576.0 => format!("{} MiB", (value / 1_048_576.0).round()),
        value if value >= 1024.0 => format!("{} KiB", (value / 1024.0).round()),
        value => format!("{value} B"),
    }
}

/// Text between tags.
pub(crate) fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            // XML has no other control characters.
            character if character.is_control() => out.push(' '),
            character => out.push(character),
        }
    }
    out
}

/// An empty page, not yet closed.
pub(crate) fn page(width: f64, height: f64) -> String {
    format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12" fill="#1b1b1b">
<rect width="{width}" height="{height}" fill="#fff"/>
"##
    )
}

/// Ends a page.
pub(crate) fn close(mut page: String) -> String {
    page.push_str("</svg>\n");
    page
}

/// A line of a picture.
pub(crate) struct Line<'a> {
    /// In the legend.
    pub(crate) name: String,
    /// Of [`COLOURS`] or its owner.
    pub(crate) colour: &'a str,
    pub(crate) is_dashed: bool,
    /// Bytes of a rank's tensor, microseconds; both above 0.
    pub(crate) points: Vec<(f64, f64)>,
}

/// Latency over size, both logarithmic; none without a point. `what` is measured stands below.
pub(crate) fn lines(title: &str, what: &str, lines: &[Line<'_>]) -> Option<String> {
    let points = || lines.iter().flat_map(|line| &line.points);
    points().next()?;
    let [left, right, top, bottom] = FRAME;
    let x = Axis::over(points().map(|(bytes, _)| *bytes), 4.0, left, right);
    let y = Axis::over(points().map(|(_, us)| *us), 10.0, bottom, top);
    let mut out = page(WIDTH, HEIGHT);
    // Writing to a String does not fail.
    if !title.is_empty() {
        let _ = writeln!(
            out,
            r#"<text x="{left}" y="{:.1}" font-weight="bold">{}</text>"#,
            top - 12.0,
            escaped(title)
        );
    }
    for tick in x.ticks(4.0) {
        let at = x.place(tick);
        let _ = writeln!(
            out,
            r##"<path d="M{at:.1} {top}V{bottom}" stroke="#ddd"/><text x="{at:.1}" y="{:.1}" text-anchor="middle">{}</text>"##,
            bottom + 18.0,
            bytes(tick)
        );
    }
    for tick in y.ticks(10.0) {
        let at = y.place(tick);
        let _ = writeln!(
            out,
            r##"<path d="M{left} {at:.1}H{right}" stroke="#ddd"/><text x="{:.1}" y="{:.1}" text-anchor="end">{tick} us</text>"##,
            left - 6.0,
            at + 4.0
        );
    }
    for (index, line) in lines.iter().enumerate() {
        let mut points = line.points.clone();
        points.sort_by(|one, other| one.0.total_cmp(&other.0));
        let colour = line.colour;
        let dash = match line.is_dashed {
            false => "",
            true => r#" stroke-dasharray="5 3""#,
        };
        let path: Vec<String> = points
            .iter()
            .map(|(bytes, us)| format!("{:.1} {:.1}", x.place(*bytes), y.place(*us)))
            .collect();
        if !path.is_empty() {
            let _ = writeln!(
                out,
                r#"<path d="M{}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>"#,
                path.join("L")
            );
        }
        let row = top + 10.0 + 18.0 * index as f64;
        let _ = writeln!(
            out,
            r#"<path d="M{:.1} {:.1}h22" stroke="{colour}" stroke-width="3"{dash}/><text x="{:.1}" y="{row:.1}">{}</text>"#,
            right + 20.0,
            row - 4.0,
            right + 50.0,
            escaped(&line.name)
        );
    }
    let _ = writeln!(
        out,
        r#"<text x="{:.1}" y="{:.1}" text-anchor="middle">{}</text>"#,
        (left + right) / 2.0,
        bottom + 40.0,
        escaped(what)
    );
    Some(close(out))
}

/// Whether it is XML whose every tag is closed, with one root, and no script or reference to elsewhere: for tests.
#[cfg(test)]
pub(crate) fn is_well_formed(text: &str) -> Result<(), String> {
    let mut open: Vec<&str> = Vec::new();
    let mut roots = 0;
    let mut rest = text.trim_end();
    while let Some((before, after)) = rest.split_once('<') {
        if before.contains('>') || (open.is_empty() && !before.trim().is_empty()) {
            return Err(format!("stray text {before:?}"));
        }
        let entities = before.split('&').skip(1);
        let known = ["amp;", "lt;", "gt;", "quot;"];
        for entity in entities {
            if !known.iter().any(|of| entity.starts_with(of)) {
                return Err(format!("entity {entity:?}"));
            }
        }
        let (tag, next) = after.split_once('>').ok_or("a tag without an end")?;
        rest = next;
        if let Some(name) = tag.strip_prefix('/') {
            if open.pop() != Some(name) {
                return Err(format!("{name} closes what is not open"));
            }
            continue;
        }
        let name = tag.trim_end_matches('/');
        let name = name.split_whitespace().next().unwrap_or("");
        if ["", "script", "image", "use", "style"].contains(&name) {
            return Err(format!("tag {name:?}"));
        }
        if tag.matches('"').count() % 2 != 0 || tag.contains("NaN") || tag.contains("inf") {
            return Err(format!("attributes of {tag:?}"));
        }
        roots += usize::from(open.is_empty());
        if !tag.ends_with('/') {
            open.push(name);
        }
    }
    match (open.is_empty() && rest.is_empty(), roots) {
        (true, 1) => Ok(()),
        _ => Err(format!("{open:?} open, {roots} roots, {rest:?} left")),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_check_of_pictures_sees_what_is_wrong() {
        assert_eq!(
            is_well_formed("<svg><g a=\"1\"><path/></g>x &amp; y</svg>\n"),
            Ok(())
        );
        for bad in [
            "<svg>",
            "<svg><g></svg></g>",
            "<svg/><svg/>",
            "<svg>a & b</svg>",
            "<svg a=\"1></svg>",
            "<svg><script/></svg>",
            "<svg/>text",
            "<svg d=\"MNaN\"/>",
        ] {
            assert!(is_well_formed(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn names_of_others_stay_text() {
        let line = Line {
            name: "<script>&\"\u{7}".to_owned(),
            colour: COLOURS.first().unwrap(),
            is_dashed: true,
            points: vec![(1024.0, 3.0)],
        };
        let picture = lines("a < b", "x & y", &[line]).unwrap();
        assert_eq!(is_well_formed(&picture), Ok(()));
        assert!(picture.contains("&lt;script&gt;&amp;&quot; </text>"));
        assert_eq!(lines("", "", &[]), None);
    }
}
