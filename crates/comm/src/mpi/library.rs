//! The MPI library of the launcher: found and opened at run time.
//!
//! `CONSORT_MPI` names it. Otherwise the launcher's variables tell its family, and the versioned names of that family are
//! tried, first beside the launcher's program and then where the system's loader looks. What a library is, it says
//! itself: its version, the version of the standard interface, the symbols of Open MPI. There is no second try after
//! `MPI_Init`, so all of this comes before.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::PathBuf;

use crate::mpi::abi::Abi;
use crate::mpi::error::MpiError;

/// A library that is open for as long as the process runs.
#[derive(Clone, Copy)]
pub(crate) struct Library(pub(super) *mut c_void);

/// A name that was tried, and what was found there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tried {
    /// The name or the path.
    pub name: String,
    /// The library, or why there is none.
    pub found: Result<Identity, String>,
}

/// What a library is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Its file.
    pub path: String,
    /// Its binary interface.
    pub abi: Abi,
    /// The first line of its version.
    pub version: String,
}

impl Tried {
    pub(crate) fn outcome(&self) -> String {
        match &self.found {
            Ok(about) => format!("{}, {}: {}", about.version, about.abi.name(), about.path),
            Err(error) => error.clone(),
        }
    }

    fn is_open_mpi(&self) -> bool {
        self.found.as_ref().is_ok_and(|about| about.version.contains("Open MPI"))
    }
}

impl Library {
    /// Opens a library, so far for this crate only.
    fn open(name: &str) -> Result<Library, String> {
        let c_name = CString::new(name).map_err(|error| error.to_string())?;
        // SAFETY: the name ends in a zero. Initialisers of the library run, as for a program that is linked with it.
        let handle = unsafe { libc::dlopen(c_name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() { Err(last_error()) } else { Ok(Library(handle)) }
    }

    /// The address of a symbol.
    pub(crate) fn symbol(self, name: &str) -> Option<*mut c_void> {
        let name = CString::new(name).ok()?;
        // SAFETY: the library is open, and the name ends in a zero.
        let at = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        if at.is_null() { None } else { Some(at) }
    }

    /// What the library is.
    fn identity(self) -> Result<Identity, String> {
        let Some(at) = self.symbol("MPI_Get_library_version") else { return Err("no MPI library".into()) };
        let version = version(at);
        let first = version.lines().next().unwrap_or_default();
        let first = first.split(',').next().unwrap_or_default();
        let abi = if self.standard_abi().is_some_and(|major| major > 0) {
            Abi::Standard
        } else if self.symbol("ompi_mpi_comm_world").is_some() {
            Abi::OpenMpi
        } else if ["MPICH", "Intel", "MVAPICH"].iter().any(|family| version.contains(family)) {
            Abi::Mpich
        } else {
            return Err(format!("an MPI library of an unknown binary interface: {first}"));
        };
        let version = first.split_whitespace().collect::<Vec<_>>().join(" ");
        Ok(Identity { path: file_of(at).unwrap_or_default(), abi, version })
    }

    /// The major version of the standard interface; not above 0 if the library has another.
    fn standard_abi(self) -> Option<c_int> {
        let at = self.symbol("MPI_Abi_get_version")?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the function of this name has this type in every library, and may be called before MPI_Init.
        let get = unsafe {
            std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int>(at)
        };
        // SAFETY: both are valid for the call.
        let code = unsafe { get(&mut major, &mut minor) };
        (code == 0).then_some(major)
    }
}

/// The version that a library's function gives.
fn version(at: *mut c_void) -> String {
    // Room for every library: the standard's limit is 8192.
    let (mut text, mut len) = (vec![0u8; 1 << 15], 0);
    // SAFETY: the function of this name has this type in every library, and may be called before MPI_Init.
    let get = unsafe {
        std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_char, *mut c_int) -> c_int>(at)
    };
    // SAFETY: the text is longer than any version.
    unsafe { get(text.as_mut_ptr().cast(), &mut len) };
    text.truncate(usize::try_from(len).unwrap_or(0));
    String::from_utf8_lossy(&text).trim_end_matches('\0').to_string()
}

/// The file that an address is in.
fn file_of(at: *mut c_void) -> Option<String> {
    let mut info = libc::Dl_info {
        dli_fname: std::ptr::null(),
        dli_fbase: std::ptr::null_mut(),
        dli_sname: std::ptr::null(),
        dli_saddr: std::ptr::null_mut(),
    };
    // SAFETY: any address may be asked for; the answer is written there.
    let known = unsafe { libc::dladdr(at, &mut info) } != 0 && !info.dli_fname.is_null();
    // SAFETY: the name belongs to the library, which stays open.
    known.then(|| unsafe { CStr::from_ptr(info.dli_fname) }.to_string_lossy().into_owned())
}

fn last_error() -> String {
    // SAFETY: the text is this thread's, until its next call of the loader.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "not found".to_string();
    }
    // SAFETY: as above.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// What the launcher's variables say of its MPI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Family {
    OpenMpi,
    Mpich,
    Unknown,
}

impl Family {
    fn read(lookup: impl Fn(&str) -> Option<String>) -> Family {
        let is_set = |name: &str| lookup(name).is_some();
        if is_set("OMPI_COMM_WORLD_SIZE") {
            Family::OpenMpi
        } else if is_set("PMI_RANK") && !is_set("SLURM_PROCID") && !is_set("PMIX_RANK") {
            Family::Mpich
        } else {
            // Slurm and PMIx start either.
            Family::Unknown
        }
    }

    fn launcher(self) -> &'static str {
        match self {
            Family::OpenMpi => "Open MPI's mpirun",
            Family::Mpich => "an mpirun of MPICH's family",
            Family::Unknown => "this process",
        }
    }

    /// The names of its libraries, the likeliest first. Unversioned names may be anything.
    fn names(self) -> &'static [&'static str] {
        match self {
            Family::OpenMpi => &["libmpi.so.40", "libmpi_abi.so.1"],
            Family::Mpich => &["libmpi.so.12", "libmpich.so.12", "libmpi_abi.so.1"],
            Family::Unknown => &["libmpi.so.40", "libmpi.so.12", "libmpich.so.12", "libmpi_abi.so.1"],
        }
    }

    fn has(self, tried: &Tried) -> bool {
        tried.found.is_ok()
            && match self {
                Family::OpenMpi => tried.is_open_mpi(),
                Family::Mpich => !tried.is_open_mpi(),
                Family::Unknown => true,
            }
    }
}

/// The folder of libraries beside the program that started this one.
fn beside_the_launcher() -> Option<PathBuf> {
    let parent = rustix::process::getppid()?;
    let program = std::fs::read_link(format!("/proc/{}/exe", parent.as_raw_nonzero())).ok()?;
    Some(program.parent()?.parent()?.join("lib"))
}

fn try_name(name: String) -> Tried {
    let found = Library::open(&name).and_then(Library::identity);
    Tried { name, found }
}

/// What is found under one of these names: beside the launcher, then anywhere.
fn try_everywhere(name: &str) -> Vec<Tried> {
    let beside = beside_the_launcher().map(|folder| folder.join(name)).filter(|path| path.exists());
    let beside = beside.map(|path| try_name(path.to_string_lossy().into_owned()));
    beside.into_iter().chain([try_name(name.to_string())]).collect()
}

/// The libraries that are tried, and what `CONSORT_MPI` and the launcher make of them.
pub struct Survey {
    /// What was tried.
    pub tried: Vec<Tried>,
    /// The one that is used, or why none is.
    pub chosen: Result<Identity, MpiError>,
}

/// Looks for the library of the launcher.
pub fn survey() -> Survey {
    let lookup = |name: &str| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
    if let Some(name) = lookup("CONSORT_MPI").filter(|name| !name.is_empty()) {
        let tried = try_name(name);
        let chosen = tried.found.clone().map_err(|_| MpiError::Named { tried: tried.clone() });
        return Survey { tried: vec![tried], chosen };
    }
    let family = Family::read(lookup);
    let tried: Vec<Tried> = family.names().iter().flat_map(|name| try_everywhere(name)).collect();
    let chosen = choose(family, &tried);
    Survey { tried, chosen }
}

/// The first library of the family. Where the family is not known, all must be of one.
fn choose(family: Family, tried: &[Tried]) -> Result<Identity, MpiError> {
    let mut of_family = tried.iter().filter(|tried| family.has(tried));
    let missing = || MpiError::Missing { launcher: family.launcher().to_string(), tried: tried.to_vec() };
    let first = of_family.next().ok_or_else(missing)?;
    if family == Family::Unknown && of_family.any(|other| other.is_open_mpi() != first.is_open_mpi()) {
        return Err(MpiError::Ambiguous { tried: tried.to_vec() });
    }
    first.found.clone().map_err(|_| missing())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn family(variables: &[&str]) -> Family {
        Family::read(|name| variables.contains(&name).then(|| "1".to_string()))
    }

    fn found(name: &str, version: &str) -> Tried {
        let about =
            Identity { path: format!("/lib/{name}"), abi: Abi::Standard, version: version.to_string() };
        Tried { name: name.to_string(), found: Ok(about) }
    }

    #[test]
    fn the_launchers_variables_tell_its_family() {
        assert_eq!(family(&["OMPI_COMM_WORLD_SIZE", "PMIX_RANK"]), Family::OpenMpi);
        assert_eq!(family(&["PMI_RANK"]), Family::Mpich);
        assert_eq!(family(&["PMI_RANK", "SLURM_PROCID"]), Family::Unknown);
        assert_eq!(family(&["PMIX_RANK"]), Family::Unknown);
        assert_eq!(family(&[]), Family::Unknown);
    }

    #[test]
    fn the_library_is_one_of_the_launchers_family() {
        let none = Tried { name: "libmpi.so.12".to_string(), found: Err("not found".to_string()) };
        let tried =
            [found("libmpi.so.40", "Open MPI v4.1.4"), none.clone(), found("libmpich.so.12", "MPICH 4.0")];
        let path = |family| choose(family, &tried).map(|about| about.path);
        assert_eq!(path(Family::OpenMpi), Ok("/lib/libmpi.so.40".to_string()));
        assert_eq!(path(Family::Mpich), Ok("/lib/libmpich.so.12".to_string()));
        let ambiguous = path(Family::Unknown).unwrap_err();
        assert_eq!(ambiguous, MpiError::Ambiguous { tried: tried.to_vec() });
        let text = ambiguous.to_string();
        assert!(text.contains("Open MPI v4.1.4") && text.contains("CONSORT_MPI"), "{text}");
        // One family is enough where the launcher does not say.
        assert_eq!(choose(Family::Unknown, &tried[1..]).unwrap().path, "/lib/libmpich.so.12");
        let missing = choose(Family::OpenMpi, &tried[1..]).unwrap_err().to_string();
        assert!(missing.contains("Open MPI's mpirun") && missing.contains("libmpi.so.12"), "{missing}");
    }
}
