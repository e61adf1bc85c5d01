//! Descriptions as TOML.
//!
//! Owns reading, with errors that name file, line, key and what to do, and writing. Called by `load` (the daemon's
//! configuration), `probe`, `explain` and for presets. Refuses unknown keys, and whatever is no machine.

use super::{Description, MAX_GPUS, SCHEMA_VERSION, Topology, TopologyError};
use crate::config::Problem;
use crate::files;
use crate::lines::{Lines, line_of};
use std::fmt;
use std::path::{Path, PathBuf};

/// A topology file cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FileError {
    /// It cannot be read.
    #[error("{}: cannot be read: {source}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It can, but is wrong.
    #[error("{}", Located { origin, problem })]
    Invalid {
        /// The file.
        origin: String,
        /// What is wrong with it.
        problem: Problem,
    },
    /// It cannot be written.
    #[error("{}: cannot be written: {source}", path.display())]
    Unwritable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
}

struct Located<'a> {
    origin: &'a str,
    problem: &'a Problem,
}

impl fmt::Display for Located<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.problem.write(self.origin, f)
    }
}

impl Topology {
    /// Reads a file.
    ///
    /// # Errors
    /// [`FileError`].
    pub(crate) fn read(path: &Path) -> Result<Self, FileError> {
        let unreadable = |source| FileError::Unreadable {
            path: path.to_owned(),
            source,
        };
        let text = files::read_text(path).map_err(unreadable)?;
        Self::from_toml(&path.display().to_string(), &text)
    }

    /// Reads a text; `origin` is what errors call it.
    ///
    /// # Errors
    /// [`FileError::Invalid`].
    pub(crate) fn from_toml(origin: &str, text: &str) -> Result<Self, FileError> {
        let invalid = |key: String, line, reason| FileError::Invalid {
            origin: origin.to_owned(),
            problem: Problem { key, line, reason },
        };
        let lines = Lines::new(text).map_err(|error| {
            let line = error.span().map(|span| line_of(text, span.start));
            invalid(String::new(), line, error.message().to_owned())
        })?;
        let parsed: Result<Description, toml::de::Error> = toml::from_str(text);
        let description = parsed.map_err(|error| {
            invalid(
                lines.key_of(&error).unwrap_or_default(),
                error.span().map(|at| line_of(text, at.start)),
                error.message().to_owned(),
            )
        })?;
        Self::new(description).map_err(|error| {
            let (key, line) = place_of(&error, &lines);
            invalid(key, line, format!("{error}; {}", advice(&error)))
        })
    }
}

impl Description {
    /// The file's text.
    ///
    /// # Errors
    /// Whatever TOML cannot say, which is nothing that a [`Topology`] can be made of.
    pub(crate) fn to_toml(&self) -> Result<String, toml::ser::Error> {
        toml::to_string(self)
    }

    /// Whether a file can be written there; leaves nothing behind.
    ///
    /// # Errors
    /// [`FileError::Unwritable`].
    pub(crate) fn check_writable(path: &Path) -> Result<(), FileError> {
        files::check_writable(path).map_err(|source| FileError::Unwritable {
            path: path.to_owned(),
            source,
        })
    }

    /// Writes a file.
    ///
    /// # Errors
    /// [`FileError::Unwritable`].
    pub(crate) fn write(&self, path: &Path) -> Result<(), FileError> {
        let text = self.to_toml().map_err(std::io::Error::other);
        let written = text.and_then(|text| files::write_text(path, &text));
        written.map_err(|source| FileError::Unwritable {
            path: path.to_owned(),
            source,
        })
    }
}

/// The key that an error is about, and its line.
fn place_of(error: &TopologyError, lines: &Lines) -> (String, Option<usize>) {
    let at = |key: &str| (key.to_owned(), lines.line_of_key(key));
    match error {
        TopologyError::Version(_) => at("schema_version"),
        TopologyError::TooManyGpus(_) => at(&format!("gpu[{MAX_GPUS}]")),
        TopologyError::BadNumber { key, .. } => {
            // "rates.write_gbps" is a key; "gpu0: pcie.width" is one of the table that has this name.
            let of_named = key.split_once(": ").and_then(|(name, rest)| {
                let mut named = lines.keys_saying(name).into_iter();
                let table = named.find_map(|(key, _)| key.strip_suffix(".name"))?;
                Some(format!("{table}.{rest}"))
            });
            match of_named {
                Some(key) => at(&key),
                None => at(key),
            }
        }
        TopologyError::BadName { what, name, why } => {
            let said = lines.keys_saying(name);
            let is_name = |key: &str| key.ends_with(".name");
            // Where it is said the last time, of a kind that fits.
            let found = said
                .iter()
                .rfind(|(key, _)| match *why {
                    "is there twice" | "is no name" if *what != "pair of gpu" => {
                        is_name(key) || key.ends_with(".uuid")
                    }
                    _ => !is_name(key),
                })
                .or(said.last());
            match found {
                Some((key, line)) => ((*key).to_owned(), Some(*line)),
                None => (String::new(), None),
            }
        }
    }
}

/// What to do about it.
fn advice(error: &TopologyError) -> String {
    match error {
        TopologyError::Version(_) => {
            format!("write schema_version = {SCHEMA_VERSION}, or use the program it was made for")
        }
        TopologyError::TooManyGpus(_) => "describe the GPUs that the ranks are on".to_owned(),
        TopologyError::BadNumber { .. } => "correct it, or leave it out".to_owned(),
        TopologyError::BadName { what, why, .. } => match (*what, *why) {
            ("uuid", "is no UUID") => {
                "write it as `nvidia-smi -L` does, GPU- and 8-4-4-4-12 hexadecimal digits"
                    .to_owned()
            }
            ("root or switch", "is not described") => {
                "add a [[root]] or [[switch]] of that name".to_owned()
            }
            (_, "is not described") => format!("add a [[{what}]] of that name"),
            ("switch", "is above itself") => "follow its parents, and end at a [[root]]".to_owned(),
            (_, "is there twice") => "remove one, or rename it".to_owned(),
            (_, "is no name") => {
                "names have at least one character, and no control characters".to_owned()
            }
            (_, _) => "name two different GPUs".to_owned(),
        },
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing)]
    use super::*;
    use crate::topology::{
        Gpu, InterSocket, NvLink, NvLinkPair, Pair, Pcie, Rates, Root, Socket, Switch,
    };
    use proptest::prelude::*;

    fn outcome(text: &str) -> String {
        match Topology::from_toml("file", text) {
            Ok(_) => "accepted".to_owned(),
            Err(error) => error.to_string(),
        }
    }

    const TWO: &str = r#"schema_version = 1
name = "two"
[[root]]
name = "r"
[[switch]]
name = "s"
parent = "r"
pcie = { generation = 5, width = 16 }
[[gpu]]
name = "a"
parent = "s"
pcie = { generation = 5, width = 16 }
[[gpu]]
name = "b"
parent = "s"
pcie = { generation = 5, width = 16 }
"#;

    #[test]
    fn a_good_file_is_read_and_written_the_same() {
        let read = Topology::from_toml("file", TWO).unwrap();
        let again = Topology::from_toml("again", &read.description().to_toml().unwrap()).unwrap();
        assert_eq!(read, again);
        assert_eq!(read.gpus().len(), 2);
    }

    #[test]
    fn errors_name_line_key_and_what_to_do() {
        let with = |from: &str, to: &str| {
            assert!(TWO.contains(from), "{from}");
            TWO.replacen(from, to, 1)
        };
        let more = |text: &str| format!("{TWO}{text}");
        let gpus: String = (0..17)
            .map(|gpu| format!("[[gpu]]\nname = \"g{gpu}\"\nparent = \"r\"\npcie = {{ generation = 5, width = 16 }}\n"))
            .collect();
        for (text, expected) in [
            (
                with("name = \"two\"", "nama = \"two\""),
                "file:2: nama: unknown field `nama`",
            ),
            (with("name = \"two\"\n", ""), "file:1: missing field `name`"),
            (
                with("schema_version = 1", "schema_version = \"1\""),
                "file:1: schema_version: invalid type: string \"1\", expected u32",
            ),
            (
                with("schema_version = 1", "schema_version = 7"),
                "file:1: schema_version: schema_version = 7: this program reads 1; write schema_version = 1",
            ),
            (
                with("generation = 5", "generation = 9"),
                "file:8: switch[0].pcie.generation: s: pcie.generation = 9: 1 to 7; ",
            ),
            (
                with("width = 16", "width = 3"),
                "file:8: switch[0].pcie.width: s: pcie.width = 3: lanes",
            ),
            (
                with("width = 16", "with = 16"),
                "file:8: switch[0].pcie.with: unknown field `with`",
            ),
            (
                with("parent = \"r\"", "parent = \"s\""),
                "file:15: gpu[1].parent: switch \"s\" is above itself; follow",
            ),
            (
                with("parent = \"s\"", "parent = \"t\""),
                "file:11: gpu[0].parent: root or switch \"t\" is not described; add a [[root]] or [[switch]]",
            ),
            (
                with("name = \"b\"", "name = \"a\""),
                "file:14: gpu[1].name: gpu \"a\" is there twice; remove one",
            ),
            (
                with("name = \"s\"", "name = \"r\""),
                "file:6: switch[0].name: root or switch \"r\" is there twice",
            ),
            (
                with("name = \"b\"", "name = \"\""),
                "file:14: gpu[1].name: gpu \"\" is no name; names have",
            ),
            (
                with("name = \"b\"", "name = \"b\"\nuuid = \"GPU-1\""),
                "file:15: gpu[1].uuid: uuid \"GPU-1\" is no UUID; write it as `nvidia-smi -L` does",
            ),
            (
                with("name = \"r\"", "name = \"r\"\nsocket = \"north\""),
                "file:5: root[0].socket: socket \"north\" is not described; add a [[socket]]",
            ),
            (
                with("parent = \"s\"\n", ""),
                "file:9: gpu[0]: missing field `parent`",
            ),
            (
                more("[rates]\nwrite_gbps = nan\n"),
                "file:18: rates.write_gbps: rates.write_gbps = NaN: a number from 0.000001 to 1000000000; correct it",
            ),
            (
                more("[rates]\nflag_us = -1.5\n"),
                "file:18: rates.flag_us: rates.flag_us = -1.5: a number from 0.000001 to 1000000000",
            ),
            (
                more("[rates]\nflag_us = inf\n"),
                "file:18: rates.flag_us: ",
            ),
            (
                more("[rates]\nflag_us = \"1\"\n"),
                "file:18: rates.flag_us: invalid type: string \"1\", expected f64",
            ),
            (
                more("[rates]\nspeed = 1\n"),
                "file:18: rates.speed: unknown field `speed`",
            ),
            (
                more("[inter_socket]\ngbps = 0\n"),
                "file:18: inter_socket.gbps: ",
            ),
            (
                more("[[pair]]\nfrom = \"a\"\nto = \"c\"\n"),
                "file:19: pair[0].to: gpu \"c\" is not described; add a [[gpu]]",
            ),
            (
                more("[[pair]]\nfrom = \"a\"\nto = \"a\"\n"),
                "file:19: pair[0].to: pair of gpu \"a\" is of one GPU with itself; name two",
            ),
            (
                more("[[pair]]\nfrom = \"a\"\nto = \"b\"\n[[pair]]\nfrom = \"a\"\nto = \"b\"\n"),
                "file:21: pair[1].from: pair of gpu \"a\" is there twice",
            ),
            (
                more("[[nvlink.pair]]\ngpus = [\"a\", \"a\"]\ngbps = 1\n"),
                "file:18: nvlink.pair[0].gpus[1]: gpu \"a\" has NVLink to itself",
            ),
            (
                more("[[nvlink.pair]]\ngpus = [\"a\"]\ngbps = 1\n"),
                "file:18: nvlink.pair[0].gpus: invalid length 1",
            ),
            (
                format!("schema_version = 1\nname = \"many\"\n[[root]]\nname = \"r\"\n{gpus}"),
                "file:69: gpu[16]: 17 GPUs: a topology has 0 (host only) to 16; describe",
            ),
            ("[[gpu]\n".to_owned(), "file:1: "),
            (
                "schema_version = 1\nname = \"x\"\ngpu = 3\n".to_owned(),
                "file:3: gpu: invalid type: integer `3`, expected a sequence",
            ),
            (
                // A cycle that no GPU is below.
                "schema_version = 1\nname = \"x\"\n[[switch]]\nname = \"a\"\nparent = \"b\"\npcie = { generation = 4, width = 8 }\n[[switch]]\nname = \"b\"\nparent = \"a\"\npcie = { generation = 4, width = 8 }\n".to_owned(),
                "file:9: switch[1].parent: switch \"a\" is above itself",
            ),
        ] {
            let found = outcome(&text);
            assert!(found.starts_with(expected), "{text}\n{found}\n{expected}");
        }
    }

    #[test]
    fn files_that_cannot_be_used_are_named() {
        let missing = Topology::read(Path::new("/nowhere/topology.toml")).unwrap_err();
        assert!(
            missing
                .to_string()
                .starts_with("/nowhere/topology.toml: cannot be read: "),
            "{missing}"
        );
        for no_file in ["/proc", "/dev/zero"] {
            let error = Topology::read(Path::new(no_file)).unwrap_err();
            let said = error.to_string();
            let is_said = ["is no regular file", "is a directory"];
            assert!(is_said.iter().any(|end| said.ends_with(end)), "{said}");
        }
        let written = Description::default().write(Path::new("/nowhere/topology.toml"));
        assert!(matches!(written, Err(FileError::Unwritable { .. })));
    }

    fn text() -> impl Strategy<Value = String> {
        // Anything that a TOML string must escape.
        proptest::collection::vec(any::<char>(), 0..12)
            .prop_map(|chars| chars.into_iter().collect())
    }

    fn rate() -> impl Strategy<Value = Option<f64>> {
        proptest::option::of(prop_oneof![
            0.001..2000.0_f64,
            Just(1.0),
            Just(1e-6),
            Just(1e9)
        ])
    }

    fn rates() -> impl Strategy<Value = Rates> {
        proptest::collection::vec(rate(), 12).prop_map(|rates| {
            let at = |index: usize| rates.get(index).copied().flatten();
            Rates {
                write_gbps: at(0),
                read_gbps: at(1),
                write_all_gbps: at(2),
                read_all_gbps: at(3),
                write_collapse_gbps: at(4),
                host_write_gbps: at(5),
                host_read_gbps: at(6),
                memory_gbps: at(7),
                flag_us: at(8),
                launch_us: at(9),
                core_copy_gbps: at(10),
                core_flag_us: at(11),
            }
        })
    }

    fn pcie() -> impl Strategy<Value = Pcie> {
        let width = proptest::sample::select(vec![1, 2, 4, 8, 12, 16, 32]);
        (1..=7_u32, width).prop_map(|(generation, width)| Pcie { generation, width })
    }

    prop_compose! {
        /// A tree of what fits together, with any words and numbers in it.
        fn description()(
            name in text(), about in text(), sources in proptest::collection::vec(text(), 0..3),
            peer_access in any::<bool>(), rates in rates(), inter in rate(), switch_gbps in rate(),
            num_sockets in 0..3_usize, num_roots in 1..4_usize,
            switches in proptest::collection::vec((any::<usize>(), pcie()), 0..4),
            gpus in proptest::collection::vec((any::<usize>(), pcie(), proptest::option::of(text()), proptest::option::of(any::<u128>()), proptest::option::of(0..9_u32)), 0..=16),
            pairs in proptest::collection::btree_set((0..16_usize, 0..16_usize), 0..9),
            measured in (rate(), rate(), rate(), any::<bool>()),
        ) -> Description {
            let num_gpus = gpus.len();
            let sockets: Vec<Socket> = (0..num_sockets).map(|of| Socket { name: format!("socket {of}") }).collect();
            let mut parents: Vec<String> = (0..num_roots).map(|of| format!("root{of}")).collect();
            let roots = (0..num_roots).map(|of| Root {
                name: format!("root{of}"),
                socket: sockets.get(of % 3).map(|socket| socket.name.clone()),
            }).collect();
            let mut described = Vec::new();
            for (of, (parent, pcie)) in switches.into_iter().enumerate() {
                let parent = parents[parent % parents.len()].clone();
                described.push(Switch { name: format!("sw{of}"), parent, pcie });
                parents.push(format!("sw{of}"));
            }
            let of_pairs: Vec<(usize, usize)> = pairs.into_iter()
                .filter(|(from, to)| from != to && *from < num_gpus && *to < num_gpus).collect();
            let nvlinks = of_pairs.iter().filter(|(from, to)| from < to).map(|(from, to)| NvLinkPair {
                gpus: [format!("gpu \u{e9}{from}"), format!("gpu \u{e9}{to}")],
                gbps: measured.0.unwrap_or(25.0),
            }).collect();
            Description {
                schema_version: SCHEMA_VERSION,
                name, description: about, sources, peer_access, rates,
                inter_socket: inter.map(|gbps| InterSocket { gbps }),
                nvlink: Some(NvLink { switch_gbps, pairs: nvlinks }),
                sockets, roots, switches: described,
                gpus: gpus.into_iter().enumerate().map(|(of, (parent, pcie, product, uuid, numa_node))| Gpu {
                    name: format!("gpu \u{e9}{of}"),
                    uuid: uuid.map(|id| {
                        // The last digits are the GPU's own.
                        let digits = format!("{:032x}", (id & !0xff) | of as u128);
                        format!("GPU-{}-{}-{}-{}-{}", &digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..])
                    }),
                    bus_id: product.clone(),
                    product, parent: parents[parent % parents.len()].clone(), pcie, numa_node,
                }).collect(),
                pairs: of_pairs.into_iter().map(|(from, to)| Pair {
                    from: format!("gpu \u{e9}{from}"), to: format!("gpu \u{e9}{to}"),
                    peer_access: measured.3, write_gbps: measured.0, read_gbps: measured.1, flag_us: measured.2,
                }).collect(),
            }
        }
    }

    proptest! {
        /// Broken by a key that is not written, written twice, or read into another place.
        #[test]
        fn what_builds_comes_back_from_toml(description in description()) {
            let built = Topology::new(description.clone()).unwrap();
            let text = description.to_toml().unwrap();
            let read = Topology::from_toml("file", &text).unwrap();
            prop_assert_eq!(read.description(), &description, "{}", text);
            prop_assert_eq!(read, built);
        }

        /// Whatever is done to a file, it is read or refused.
        #[test]
        fn no_text_panics(at in 0..TWO.len(), with in text(), len in 0..20_usize) {
            let mut bytes = TWO.as_bytes().to_vec();
            let end = (at + len).min(bytes.len());
            bytes.splice(at..end, with.bytes());
            if let Ok(text) = String::from_utf8(bytes) {
                let _ = Topology::from_toml("file", &text);
            }
        }
    }
}
