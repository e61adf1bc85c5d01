//! Rules of the repository that a reader cannot be expected to check by eye.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
#![allow(clippy::indexing_slicing, missing_docs, unreachable_pub)]

use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .unwrap()
        .to_owned()
}

/// Directories that hold no source of ours: hidden, build outputs, fetched models.
fn is_source_dir(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let is_build_output = path.join("CACHEDIR.TAG").exists();
    let fetched = ["target", "model", "gpu-bundle", "node_modules", "shared"];
    !name.starts_with('.') && !is_build_output && !fetched.contains(&name.as_ref())
}

/// Every file of the workspace, with its text; binary files are left out.
fn files() -> Vec<(PathBuf, String)> {
    let mut files = Vec::new();
    let mut dirs = vec![root()];
    while let Some(dir) = dirs.pop() {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_symlink() {
                continue;
            }
            if path.is_dir() {
                if is_source_dir(&path) {
                    dirs.push(path);
                }
            } else if let Ok(text) = std::fs::read_to_string(&path) {
                files.push((path, text));
            }
        }
    }
    assert!(files.len() > 50, "the workspace was not found");
    files
}

fn manifests() -> Vec<(PathBuf, String)> {
    let mut files = files();
    files.retain(|(path, _)| path.ends_with("Cargo.toml"));
    assert!(files.len() >= 4, "{files:?}");
    files
}

/// The (name, line) of each dependency in the sections whose name `is_wanted`.
fn dependencies(text: &str, is_wanted: impl Fn(&str) -> bool) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut wanted = false;
    for line in text.lines() {
        if let Some(section) = line.strip_prefix('[') {
            wanted = is_wanted(section.trim_end_matches(']'));
        } else if wanted
            && !line.starts_with('#')
            && let Some((name, _)) = line.split_once(" = ")
        {
            found.push((name.trim().to_owned(), line.to_owned()));
        }
    }
    found
}

/// A dependency of a package, not the workspace's table of versions.
fn is_package_section(section: &str) -> bool {
    section.ends_with("dependencies") && !section.starts_with("workspace.")
}

#[test]
fn every_dependency_says_why() {
    let mut count = 0;
    for (path, text) in manifests() {
        for (_, line) in dependencies(&text, is_package_section) {
            count += 1;
            let why = line.rsplit_once(" # ").map(|(_, why)| why.trim());
            assert!(
                why.is_some_and(|why| why.len() >= 4),
                "{}: no reason: {line}",
                path.display()
            );
        }
    }
    assert!(count > 20, "the sections were not found");
}

/// The workspace's table holds no version that no package takes.
#[test]
fn every_version_is_used() {
    let manifests = manifests();
    let used: Vec<(String, String)> = manifests
        .iter()
        .flat_map(|(_, text)| dependencies(text, is_package_section))
        .collect();
    let root = std::fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let versions = dependencies(&root, |section| section == "workspace.dependencies");
    assert!(versions.len() > 10);
    for (name, _) in versions {
        assert!(
            used.iter().any(|(used, _)| *used == name),
            "nobody takes {name}"
        );
    }
}

/// One word for one thing.
#[test]
fn the_number_of_ranks_is_called_world_size() {
    let other_word = concat!("n", "ranks");
    for (path, text) in files() {
        assert!(
            !text.to_lowercase().contains(other_word),
            "{} says {other_word}",
            path.display()
        );
    }
}

/// A module's file, and those of the modules it is in: an allow there holds here too.
fn with_parents<'a>(
    files: &'a [(PathBuf, String)],
    path: &'a Path,
) -> impl Iterator<Item = &'a (PathBuf, String)> {
    files.iter().filter(move |(other, _)| {
        other == path
            || other.extension().is_some_and(|extension| {
                extension == "rs" && path.starts_with(other.with_extension(""))
            })
    })
}

/// Unsafe code is in named rooms only. The compiler refuses it elsewhere; this holds the names.
#[test]
fn dangerous_code_is_in_named_rooms() {
    let keyword = concat!("un", "safe");
    // Not "fn(": a pointer type is no code.
    let forms = ["{", "impl", "fn ", "extern"].map(|next| format!("{keyword} {next}"));
    let lint = format!("{keyword}_code");
    let room = format!("allow({lint})] // room: ");
    let mut files = files();
    files.retain(|(path, _)| path.extension().is_some_and(|extension| extension == "rs"));
    let mut rooms = 0;
    for (path, text) in &files {
        let code = || {
            text.lines()
                .filter(|line| !line.trim_start().starts_with("//"))
        };
        for line in code().filter(|line| line.contains(&lint)) {
            let named = line
                .split_once(&room)
                .is_some_and(|(_, name)| !name.is_empty());
            assert!(named, "{}: a room without a name: {line}", path.display());
            rooms += 1;
        }
        if code().any(|line| forms.iter().any(|form| line.contains(form.as_str()))) {
            let has_room = with_parents(&files, path).any(|(_, text)| text.contains(&room));
            assert!(has_room, "{} has no room", path.display());
        }
    }
    assert!(rooms >= 3, "the rooms were not found");
}

/// The crates' roots deny what the house rules deny.
#[test]
fn every_package_takes_the_workspaces_lints() {
    for (path, text) in manifests() {
        if text.contains("[package]") {
            assert!(
                text.contains("[lints]\nworkspace = true"),
                "{}",
                path.display()
            );
        }
    }
    let root = std::fs::read_to_string(root().join("Cargo.toml")).unwrap();
    assert!(root.contains(concat!("un", "safe_code = \"deny\"")));
}
