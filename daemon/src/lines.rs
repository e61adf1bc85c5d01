//! Where things are in a TOML text, so that errors can name the line.
//!
//! Owns the map from keys to places. Called by `config` and `topology::file`, which check values that TOML's types do
//! not. Refuses to judge values.

use std::collections::BTreeMap;
use std::ops::Range;

/// The line of byte `at`, from 1.
pub(crate) fn line_of(text: &str, at: usize) -> usize {
    text.bytes().take(at).filter(|byte| *byte == b'\n').count() + 1
}

/// Where a key is, and what it says if that is a string.
#[derive(Debug)]
struct Place {
    /// Start of the key and end of the value, bytes.
    range: Range<usize>,
    line: usize,
    is_table: bool,
    text: Option<String>,
}

/// Where each key of a TOML text is. Keys are dotted; an array's elements are `key[0]`, `key[1]`.
#[derive(Debug)]
pub(crate) struct Lines {
    places: BTreeMap<String, Place>,
}

impl Lines {
    pub(crate) fn new(text: &str) -> Result<Self, toml::de::Error> {
        let table = toml::de::DeTable::parse(text)?;
        let mut places = BTreeMap::new();
        let newlines: Vec<usize> = text.match_indices('\n').map(|(at, _)| at).collect();
        collect(table.get_ref(), "", &newlines, &mut places);
        Ok(Self { places })
    }

    /// The key that an error of reading this text is about: the innermost where it is; of a key that is missing, the table.
    pub(crate) fn key_of(&self, error: &toml::de::Error) -> Option<String> {
        let span = error.span()?;
        let is_missing = error.message().starts_with("missing field");
        self.places
            .iter()
            .filter(
                |(
                    _,
                    Place {
                        range, is_table, ..
                    },
                )| {
                    range.start <= span.start && span.end <= range.end && (*is_table || !is_missing)
                },
            )
            .max_by_key(|(key, place)| (place.range.start, key.len()))
            .map(|(key, _)| key.clone())
    }

    pub(crate) fn line_of_key(&self, key: &str) -> Option<usize> {
        self.places.get(key).map(|place| place.line)
    }

    /// Keys whose value is this string, with their lines, in the order of the text.
    pub(crate) fn keys_saying(&self, text: &str) -> Vec<(&str, usize)> {
        let mut found: Vec<_> = self
            .places
            .iter()
            .filter(|(_, place)| place.text.as_deref() == Some(text))
            .map(|(key, place)| (place.range.start, (key.as_str(), place.line)))
            .collect();
        found.sort_unstable();
        found.into_iter().map(|(_, found)| found).collect()
    }
}

fn collect(
    table: &toml::de::DeTable<'_>,
    prefix: &str,
    newlines: &[usize],
    places: &mut BTreeMap<String, Place>,
) {
    for (key, value) in table {
        let dotted = match prefix {
            "" => key.get_ref().to_string(),
            _ => format!("{prefix}.{}", key.get_ref()),
        };
        add(&dotted, key.span().start, value, newlines, places);
    }
}

fn add(
    key: &str,
    start: usize,
    value: &toml::Spanned<toml::de::DeValue<'_>>,
    newlines: &[usize],
    places: &mut BTreeMap<String, Place>,
) {
    use toml::de::DeValue;
    let end = value.span().end.max(start + 1);
    let place = Place {
        range: start..end,
        line: newlines.partition_point(|at| *at < start) + 1,
        is_table: matches!(value.get_ref(), DeValue::Table(_)),
        text: match value.get_ref() {
            DeValue::String(text) => Some(text.to_string()),
            _ => None,
        },
    };
    places.insert(key.to_owned(), place);
    match value.get_ref() {
        DeValue::Table(inner) => collect(inner, key, newlines, places),
        DeValue::Array(elements) => {
            for (index, element) in elements.iter().enumerate() {
                let key = format!("{key}[{index}]");
                add(&key, element.span().start, element, newlines, places);
            }
        }
        _ => {}
    }
}
