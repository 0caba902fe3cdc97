//! The functions of MPI that are used, and an initialised library.

use std::ffi::{CString, c_char, c_int, c_void};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::mpi::abi::{Handle, Handles, Numbers, STATUS};
use crate::mpi::comm::Comm;
use crate::mpi::error::MpiError;
use crate::mpi::library::{Identity, Library, survey};
use crate::mpi::user_ops::{Fold, UserOps};
use crate::mpi::watchdog::watched;

/// A status of any interface. Which of its words are what, the table says.
pub(super) type Status = [c_int; STATUS];

type Bytes = *const c_void;
type Room = *mut c_void;
type Ints = *const c_int;
type Out = *mut c_int;
type New = *mut Handle;

macro_rules! functions {
    ($($field:ident $name:literal ($($argument:ty),*))*) => {
        /// The functions that are used, with these types in every library, where a handle is at most a word.
        // SAFETY: each call states why its arguments are valid.
        pub(super) struct Functions { $(pub(super) $field: unsafe extern "C" fn($($argument),*) -> c_int,)* }

        impl Functions {
            fn new(library: Library, file: &str) -> Result<Functions, MpiError> {
                let find = |name: &'static str| {
                    library.symbol(name).ok_or_else(|| MpiError::Symbol { library: file.to_string(), name })
                };
                Ok(Functions {
                    // SAFETY: the function of this name has this type in every library.
                    $($field: unsafe {
                        std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) -> c_int>(find($name)?)
                    },)*
                })
            }
        }
    };
}

functions! {
    init_thread "MPI_Init_thread" (Out, *mut *mut *mut c_char, c_int, Out)
    initialized "MPI_Initialized" (Out)
    query_thread "MPI_Query_thread" (Out)
    is_thread_main "MPI_Is_thread_main" (Out)
    finalize "MPI_Finalize" ()
    error_string "MPI_Error_string" (c_int, *mut c_char, Out)
    error_class "MPI_Error_class" (c_int, Out)
    op_create "MPI_Op_create" (Fold, c_int, New)
    comm_rank "MPI_Comm_rank" (Handle, Out)
    comm_size "MPI_Comm_size" (Handle, Out)
    comm_dup "MPI_Comm_dup" (Handle, New)
    comm_split "MPI_Comm_split" (Handle, c_int, c_int, New)
    comm_split_type "MPI_Comm_split_type" (Handle, c_int, c_int, Handle, New)
    comm_free "MPI_Comm_free" (New)
    comm_set_errhandler "MPI_Comm_set_errhandler" (Handle, Handle)
    comm_get_attr "MPI_Comm_get_attr" (Handle, c_int, Room, Out)
    get_count "MPI_Get_count" (*const Status, Handle, Out)
    test "MPI_Test" (New, Out, *mut Status)
    iallreduce "MPI_Iallreduce" (Bytes, Room, c_int, Handle, Handle, Handle, New)
    ireduce "MPI_Ireduce" (Bytes, Room, c_int, Handle, Handle, c_int, Handle, New)
    ireduce_scatter "MPI_Ireduce_scatter" (Bytes, Room, Ints, Handle, Handle, Handle, New)
    ibcast "MPI_Ibcast" (Room, c_int, Handle, c_int, Handle, New)
    iallgather "MPI_Iallgather" (Bytes, c_int, Handle, Room, c_int, Handle, Handle, New)
    iallgatherv "MPI_Iallgatherv" (Bytes, c_int, Handle, Room, Ints, Ints, Handle, Handle, New)
    igather "MPI_Igather" (Bytes, c_int, Handle, Room, c_int, Handle, c_int, Handle, New)
    iscatter "MPI_Iscatter" (Bytes, c_int, Handle, Room, c_int, Handle, c_int, Handle, New)
    ialltoall "MPI_Ialltoall" (Bytes, c_int, Handle, Room, c_int, Handle, Handle, New)
    ibarrier "MPI_Ibarrier" (Handle, New)
    isend "MPI_Isend" (Bytes, c_int, Handle, c_int, c_int, Handle, New)
    issend "MPI_Issend" (Bytes, c_int, Handle, c_int, c_int, Handle, New)
    irecv "MPI_Irecv" (Room, c_int, Handle, c_int, c_int, Handle, New)
    iprobe "MPI_Iprobe" (c_int, c_int, Handle, Out, *mut Status)
    improbe "MPI_Improbe" (c_int, c_int, Handle, Out, New, *mut Status)
    imrecv "MPI_Imrecv" (Room, c_int, Handle, New, New)
}

/// Whether this process has started MPI for a rank: it does so once, and the thread that did makes all calls.
static IS_STARTED: AtomicBool = AtomicBool::new(false);

/// An initialised library. One thread uses it.
pub(crate) struct Mpi {
    pub(super) functions: Functions,
    pub(super) handles: Handles,
    pub(super) numbers: Numbers,
    pub(super) user_ops: UserOps,
    pub(crate) identity: Identity,
}

impl Mpi {
    /// Opens the library of the launcher, which started `launched` ranks, and initialises it.
    pub(crate) fn start(launched: usize, deadline: Duration) -> Result<Rc<Mpi>, MpiError> {
        let identity = survey().chosen?;
        let library = Library::share(&identity)?;
        let symbol = |name| library.symbol(name).map(|at| at.addr());
        let missing = |name| MpiError::Symbol { library: identity.path.clone(), name };
        let handles = Handles::new(identity.abi, |name| symbol(name).ok_or_else(|| missing(name)))?;
        let functions = Functions::new(library, &identity.path)?;
        let numbers = Numbers::new(identity.abi);
        let mpi = Rc::new(Mpi { functions, handles, numbers, user_ops: UserOps::default(), identity });
        if IS_STARTED.swap(true, Ordering::Relaxed) {
            return Err(MpiError::Again);
        }
        let mut before = 0;
        // SAFETY: may be called at any time.
        mpi.check("MPI_Initialized", unsafe { (mpi.functions.initialized)(&mut before) })?;
        if before == 0 {
            // Whether it was this call or the program that initialised MPI, the library is asked afterwards.
            let mut provided = 0;
            let init = || {
                let none = std::ptr::null_mut();
                let level = mpi.numbers.thread_serialized;
                // SAFETY: not initialised before; null stands for no arguments.
                unsafe { (mpi.functions.init_thread)(none, std::ptr::null_mut(), level, &mut provided) }
            };
            mpi.check("MPI_Init_thread", watched("MPI_Init_thread", deadline, init))?;
        }
        mpi.check_thread()?;
        for comm in [mpi.handles.comm_world, mpi.handles.comm_self] {
            // SAFETY: both are communicators of an initialised library.
            let code = unsafe { (mpi.functions.comm_set_errhandler)(comm, mpi.handles.errors_return) };
            mpi.check("MPI_Comm_set_errhandler", code)?;
        }
        let known = Comm::world(&mpi)?.size();
        if known != launched {
            return Err(MpiError::Count { library: mpi.identity.path.clone(), launched, known });
        }
        Ok(mpi)
    }

    /// Fails if this thread may not call MPI. All calls come from one thread, which is enough for every level of threads;
    /// below that of `MPI_THREAD_SERIALIZED` it must be the one that initialised MPI.
    fn check_thread(&self) -> Result<(), MpiError> {
        let (mut provided, mut is_main) = (0, 0);
        // SAFETY: MPI is initialised, and the number is written there.
        self.check("MPI_Query_thread", unsafe { (self.functions.query_thread)(&mut provided) })?;
        // SAFETY: as above.
        self.check("MPI_Is_thread_main", unsafe { (self.functions.is_thread_main)(&mut is_main) })?;
        match provided >= self.numbers.thread_serialized || is_main != 0 {
            true => Ok(()),
            false => Err(MpiError::Thread { library: self.identity.path.clone() }),
        }
    }

    /// The source, the tag and the bytes of a message, given its status.
    pub(super) fn envelope(&self, status: &Status) -> (usize, u64, usize) {
        let mut count = 0;
        // SAFETY: the status is one that a call has written.
        unsafe { (self.functions.get_count)(status, self.handles.byte, &mut count) };
        let source = usize::try_from(status[self.numbers.status_source]).unwrap_or(0);
        let tag = u64::try_from(status[self.numbers.status_tag]).unwrap_or(0);
        (source, tag, usize::try_from(count).unwrap_or(0))
    }

    /// Ends MPI. All ranks must call it.
    pub(crate) fn finalize(&self, deadline: Duration) -> Result<(), MpiError> {
        // SAFETY: nothing of the library is used after this.
        let code = watched("MPI_Finalize", deadline, || unsafe { (self.functions.finalize)() });
        self.check("MPI_Finalize", code)
    }

    /// The error of a call that did not return 0.
    #[inline]
    pub(super) fn check(&self, call: &'static str, code: c_int) -> Result<(), MpiError> {
        if code == 0 { Ok(()) } else { Err(self.error(call, code)) }
    }

    #[cold]
    fn error(&self, call: &'static str, code: c_int) -> MpiError {
        let (mut text, mut len, mut class) = (vec![0u8; 1 << 13], 0, 0);
        // SAFETY: the text is longer than any library's.
        unsafe { (self.functions.error_string)(code, text.as_mut_ptr().cast(), &mut len) };
        // SAFETY: the class is written there.
        unsafe { (self.functions.error_class)(code, &mut class) };
        if class == self.numbers.err_truncate {
            return MpiError::Truncated;
        }
        text.truncate(usize::try_from(len).unwrap_or(0));
        let text = String::from_utf8_lossy(&text).split_whitespace().collect::<Vec<_>>().join(" ");
        MpiError::Call { call, text }
    }
}

impl Library {
    /// Opens the library, and makes its symbols visible to the components that it loads itself.
    fn share(identity: &Identity) -> Result<Library, MpiError> {
        let name = CString::new(identity.path.as_str()).unwrap_or_default();
        // SAFETY: the name ends in a zero, and the library is open already.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
        match handle.is_null() {
            true => Err(MpiError::Symbol { library: identity.path.clone(), name: "MPI_Init_thread" }),
            false => Ok(Library(handle)),
        }
    }
}
