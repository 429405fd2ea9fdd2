//! What a pool's `flake_ref` asks for, told by how it begins.
//!
//! | reference | what it is |
//! |---|---|
//! | `builtin:busybox` | made on the node from Debian packages and the guest program |
//! | `path:/DIR` | a folder with `kernel`, `initrd` or `rootfs`, and `cmdline` |
//! | anything else with a scheme | a Nix flake: `github:org/repo?rev=...`, `git+file:///dir`, `flake:/dir` for a plain folder |
//!
//! Container images (`oci:...`) are not supported. Documents that people write are refused for a reference that is none of
//! these; signed documents are not, for a node goes on with what it accepted before.

/// A reference that this version can make an image of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ImageSource {
    Busybox,
    /// An absolute path without `..`.
    Folder(String),
    /// As `nix` spells it.
    Flake(String),
}

/// Why a reference names no image; each says what would be right.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SourceError {
    #[error(
        "must not be a container image, which this version can't run: supported are builtin:busybox, path:/DIR and Nix \
         flakes such as github:ORG/REPO"
    )]
    ContainerImage,
    #[error(
        "must be builtin:busybox, the only built-in image; or path:/DIR, or a Nix flake such as github:ORG/REPO"
    )]
    UnknownBuiltin,
    #[error("must name an absolute path without `..`")]
    RelativePath,
    #[error("must be a flake reference without `#`; the profile names the output")]
    NotAFlake,
    #[error("must begin with builtin:, path: or the scheme of a Nix flake, such as github:")]
    NoScheme,
}

impl ImageSource {
    pub fn parse(reference: &str) -> Result<Self, SourceError> {
        if let Some(name) = reference.strip_prefix("builtin:") {
            return if name == "busybox" { Ok(Self::Busybox) } else { Err(SourceError::UnknownBuiltin) };
        }
        if reference.starts_with("oci:") {
            return Err(SourceError::ContainerImage);
        }
        if let Some(folder) = reference.strip_prefix("path:") {
            return absolute(folder).map(|folder| Self::Folder(folder.to_owned()));
        }
        let flake = match reference.strip_prefix("flake:").filter(|rest| rest.starts_with('/')) {
            Some(folder) => format!("path:{}", absolute(folder)?),
            None => reference.to_owned(),
        };
        // The profile names the output, and an argument that begins with a hyphen would be an option.
        if flake.contains('#') || flake.starts_with('-') || !flake.bytes().all(|b| b.is_ascii_graphic()) {
            return Err(SourceError::NotAFlake);
        }
        if flake.contains(':') { Ok(Self::Flake(flake)) } else { Err(SourceError::NoScheme) }
    }
}

fn absolute(path: &str) -> Result<&str, SourceError> {
    let is_plain = path.starts_with('/') && path.split('/').all(|step| step != "..");
    if is_plain { Ok(path) } else { Err(SourceError::RelativePath) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reference_says_by_its_beginning_what_it_is() {
        let flake = |text: &str| ImageSource::Flake(text.to_owned());
        for (text, source) in [
            ("builtin:busybox", ImageSource::Busybox),
            ("path:/srv/image", ImageSource::Folder("/srv/image".to_owned())),
            ("github:org/repo?rev=abc", flake("github:org/repo?rev=abc")),
            ("git+file:///srv/repo", flake("git+file:///srv/repo")),
            ("flake:/srv/flake", flake("path:/srv/flake")),
        ] {
            assert_eq!(ImageSource::parse(text), Ok(source), "{text}");
        }
        for (text, rule) in [
            ("builtin:windows", SourceError::UnknownBuiltin),
            ("path:image", SourceError::RelativePath),
            ("path:/srv/../etc", SourceError::RelativePath),
            ("flake:/srv/../etc", SourceError::RelativePath),
            ("github:org/repo#other", SourceError::NotAFlake),
            ("--option:x", SourceError::NotAFlake),
            ("nixpkgs", SourceError::NoScheme),
            ("oci:docker.io/library/alpine", SourceError::ContainerImage),
        ] {
            assert_eq!(ImageSource::parse(text), Err(rule), "{text}");
        }
    }
}
