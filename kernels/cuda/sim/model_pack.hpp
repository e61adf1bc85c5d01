// Pack accesses of the harness: four words each, relaxed ones one by one, as a GPU may show them.
#pragma once
namespace allreduced {
template <int W>
constexpr u32 MAX_DATA_THREADS = 1024;
inline Pack ld_weak_pack(u64 a) { return *(const Pack*)a; }
inline void st_weak_pack(u64 a, const Pack& v) { *(Pack*)a = v; }
inline Pack ld_peer_pack(u64 a) { return ld_weak_pack(a); }
inline u32 ld_peer_u32(u64 a) { return *(const u32*)a; }
inline u32 ld_peer_u16(u64 a) { return *(const u16*)a; }
inline void st_finished_pack(u64 a, const Pack& v) {
    for (int i = 1; i < 4; i++) ((u32*)a)[i] = v.w[i];
    std::atomic_ref<u32>(*(u32*)a).store(v.w[0], std::memory_order_release);
}
inline Pack ld_relaxed_pack(u64 a) {
    Pack v;
    for (int i = 0; i < 4; i++) v.w[i] = std::atomic_ref<u32>(((u32*)a)[i]).load(std::memory_order_relaxed);
    return v;
}
inline void st_relaxed_pack(u64 a, const Pack& v) {
    for (int i = 3; i >= 0; i--) std::atomic_ref<u32>(((u32*)a)[i]).store(v.w[i], std::memory_order_relaxed);
}
inline Pack ld_dependent_pack(u64 a) {
    Pack v;
    for (int i = 0; i < 4; i++) v.w[i] = std::atomic_ref<u32>(((u32*)a)[i]).load(std::memory_order_acquire);
    return v;
}
template <bool DEPENDENT>
inline void ld_pack_if(Pack& v, u64 a, bool when) {
    if (when) v = DEPENDENT ? ld_dependent_pack(a) : ld_relaxed_pack(a);
}
inline void st_dependent_pack(u64 a, const Pack& v) {
    for (int i = 3; i >= 0; i--) std::atomic_ref<u32>(((u32*)a)[i]).store(v.w[i], std::memory_order_release);
}
}  // namespace allreduced
