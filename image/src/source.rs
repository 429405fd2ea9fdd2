//! What a reference asks for, told by how it begins.
//!
//! | reference | what it is |
//! |---|---|
//! | `builtin:busybox` | made here from Debian packages and our guest program |
//! | `path:/DIR` | a folder with `kernel`, `initrd` or `rootfs`, and `cmdline` |
//! | `oci:...` | a container image; not yet |
//! | anything else | a Nix flake: `github:org/repo?rev=...`, `git+file:///dir`, `flake:/dir` for a plain folder |

use std::path::PathBuf;

use super::ImageError;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Source {
    Busybox,
    Folder(PathBuf),
    /// As `nix` spells it.
    Flake(String),
}

impl Source {
    pub(super) fn parse(reference: &str) -> Result<Self, ImageError> {
        let refuse =
            |fault: &str| ImageError::Reference { reference: reference.to_owned(), fault: fault.to_owned() };
        if let Some(name) = reference.strip_prefix("builtin:") {
            return match name {
                "busybox" => Ok(Self::Busybox),
                _ => Err(refuse("there is no such built-in image; there is builtin:busybox")),
            };
        }
        if reference.starts_with("oci:") {
            let reference = reference.to_owned();
            return Err(ImageError::NotSupported { reference, what: "a container image" });
        }
        if let Some(folder) = reference.strip_prefix("path:") {
            return absolute(folder)
                .map(Self::Folder)
                .ok_or_else(|| refuse("must name an absolute path without `..`"));
        }
        let flake = match reference.strip_prefix("flake:").filter(|rest| rest.starts_with('/')) {
            Some(folder) => {
                absolute(folder).ok_or_else(|| refuse("must name an absolute path without `..`"))?;
                format!("path:{folder}")
            }
            None => reference.to_owned(),
        };
        // The profile names the output, and an argument that begins with a hyphen would be an option.
        if flake.contains('#') || flake.starts_with('-') || !flake.bytes().all(|b| b.is_ascii_graphic()) {
            return Err(refuse("must be a flake reference without `#`; the profile names the output"));
        }
        if !flake.contains(':') {
            return Err(refuse(
                "must begin with builtin:, path: or the scheme of a Nix flake, such as github:",
            ));
        }
        Ok(Self::Flake(flake))
    }
}

fn absolute(text: &str) -> Option<PathBuf> {
    (text.starts_with('/') && text.split('/').all(|step| step != "..")).then(|| PathBuf::from(text))
}
