//! Finds the programs of the drivers: named by the operator, or in `PATH`.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

/// A program named by the operator, else the one of this name in `PATH`. By an absolute path, for it is started in
/// another directory than this process's.
pub fn find_program(named: Option<&Path>, name: &str, path: Option<&OsStr>) -> Result<PathBuf, String> {
    let found = match named {
        Some(named) if is_program(named) => named.to_owned(),
        Some(named) => return Err(format!("{} is not a program", named.display())),
        None => {
            let mut dirs = path.map(std::env::split_paths).into_iter().flatten();
            dirs.find_map(|dir| Some(dir.join(name)).filter(|program| is_program(program)))
                .ok_or_else(|| format!("there is no {name} in PATH"))?
        }
    };
    std::path::absolute(&found).map_err(|cause| format!("{}: {cause}", found.display()))
}

fn is_program(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt as _;
    std::fs::metadata(path).is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_found_by_an_absolute_path_however_it_was_named() {
        let here = std::env::current_dir().unwrap();
        let up = "../".repeat(here.components().count() - 1);
        let relative = PathBuf::from(format!("{up}bin/sh"));
        let absolute = here.join(&relative);
        assert_eq!(find_program(Some(&relative), "sh", None).as_ref(), Ok(&absolute));
        let path = std::ffi::OsString::from(format!("{up}bin"));
        assert_eq!(find_program(None, "sh", Some(&path)), Ok(absolute));
        assert!(find_program(Some(Path::new("no-program")), "sh", None).is_err());
    }
}
