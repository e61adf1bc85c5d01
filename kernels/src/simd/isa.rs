//! What the reductions need of an instruction set.
//!
//! Owns the vocabulary: operations on one register of bits, whatever the lanes in it mean. Implemented
//! by [`avx2`](super::avx2) and [`avx512`](super::avx512), called by [`lanes`](super::lanes) and the loop. Refuses numeric rules: it
//! offers what the hardware does.

/// A token that proves that the CPU has the instruction set: it can only be made where the
/// compiler knows the features to be enabled. So arithmetic is safe, and only memory is not.
///
/// Every method must be `#[inline(always)]`: its instructions are then compiled in the kernel that
/// made the token, with the features enabled there. For the same reason their callers pass no
/// closures: those are compiled apart, and without the features.
pub(super) trait Isa: Copy {
    /// One register, as bits.
    type Register: Copy;

    /// Bytes of a register: a power of two, at most a cache line.
    const BYTES: usize;

    /// A register of zeros.
    fn zero(self) -> Self::Register;
    /// The same 32 bits in every lane.
    fn splat_32(self, bits: u32) -> Self::Register;
    /// The same 64 bits in every lane.
    fn splat_64(self, bits: u64) -> Self::Register;

    fn or(self, left: Self::Register, right: Self::Register) -> Self::Register;
    fn xor(self, left: Self::Register, right: Self::Register) -> Self::Register;
    fn and(self, left: Self::Register, right: Self::Register) -> Self::Register;
    /// Each 32-bit lane shifted up by 16 bits.
    fn shift_up_16(self, register: Self::Register) -> Self::Register;
    /// Each 32-bit lane shifted down by 16 bits, zeros coming in.
    fn shift_down_16(self, register: Self::Register) -> Self::Register;
    /// The lower half of each 32-bit lane from `lower`, the upper half from `upper`.
    fn blend_halves(self, lower: Self::Register, upper: Self::Register) -> Self::Register;

    fn add_f32(self, left: Self::Register, right: Self::Register) -> Self::Register;
    fn mul_f32(self, left: Self::Register, right: Self::Register) -> Self::Register;
    /// The lesser; `right` where the two are equal or one is a NaN.
    fn lesser_f32(self, left: Self::Register, right: Self::Register) -> Self::Register;
    /// `register`, with `instead` in the lanes that hold a NaN.
    fn replace_nan_f32(self, register: Self::Register, instead: Self::Register) -> Self::Register;
    /// Whether any lane of either holds a NaN.
    fn has_nan_f32(self, left: Self::Register, right: Self::Register) -> bool;

    fn add_f64(self, left: Self::Register, right: Self::Register) -> Self::Register;
    fn mul_f64(self, left: Self::Register, right: Self::Register) -> Self::Register;
    /// The lesser; `right` where the two are equal or one is a NaN.
    fn lesser_f64(self, left: Self::Register, right: Self::Register) -> Self::Register;
    /// `register`, with `instead` in the lanes that hold a NaN.
    fn replace_nan_f64(self, register: Self::Register, instead: Self::Register) -> Self::Register;

    fn add_i32(self, left: Self::Register, right: Self::Register) -> Self::Register;
    fn mul_i32(self, left: Self::Register, right: Self::Register) -> Self::Register;
    fn min_i32(self, left: Self::Register, right: Self::Register) -> Self::Register;
    fn max_i32(self, left: Self::Register, right: Self::Register) -> Self::Register;

    fn add_i64(self, left: Self::Register, right: Self::Register) -> Self::Register;
    fn mul_i64(self, left: Self::Register, right: Self::Register) -> Self::Register;
    fn min_i64(self, left: Self::Register, right: Self::Register) -> Self::Register;
    fn max_i64(self, left: Self::Register, right: Self::Register) -> Self::Register;

    /// The f16 lanes as f32: those of the register's lower half, those of its upper half.
    fn widen_f16(self, register: Self::Register) -> [Self::Register; 2];
    /// The inverse, rounding to nearest even; subnormals are kept.
    fn narrow_f16(self, halves: [Self::Register; 2]) -> Self::Register;

    /// Loads a register from any address.
    ///
    /// # Safety
    /// `from` is valid for reads of [`Self::BYTES`].
    unsafe fn load(self, from: *const u8) -> Self::Register;

    /// Stores a register to any address.
    ///
    /// # Safety
    /// `to` is valid for writes of [`Self::BYTES`].
    unsafe fn store(self, to: *mut u8, register: Self::Register);

    /// Stores a register past the caches. Other cores may see it only after [`Self::fence`].
    ///
    /// # Safety
    /// `to` is valid for writes of [`Self::BYTES`] and aligned to them.
    unsafe fn stream(self, to: *mut u8, register: Self::Register);

    /// Loads the first `len_bytes` bytes of a register; the others are zeros.
    ///
    /// # Safety
    /// `from` is valid for reads of `len_bytes` and aligned to 2, and `len_bytes` is even and less
    /// than [`Self::BYTES`].
    unsafe fn load_partial(self, from: *const u8, len_bytes: usize) -> Self::Register;

    /// Stores the first `len_bytes` bytes of a register.
    ///
    /// # Safety
    /// As for [`Self::load_partial`], for writes.
    unsafe fn store_partial(self, to: *mut u8, register: Self::Register, len_bytes: usize);

    /// Orders all streamed stores before any later store.
    fn fence(self);
}

/// Implements methods of [`Isa`] that only compute. Each body is an expression of intrinsics.
macro_rules! compute {
    ($(fn $name:ident($($arg:ident: $type:ty),*) -> $result:ty { $body:expr })*) => {
        $(
            #[inline(always)]
            fn $name(self, $($arg: $type),*) -> $result {
                // SAFETY: these intrinsics touch no memory and need nothing but their CPU features,
                // which the token `self` proves.
                unsafe { $body }
            }
        )*
    };
}
pub(super) use compute;
