// Functions compiled for an instruction set that the machine may lack, without touching others:
// no header with functions of its own may be included between TARGET_BEGIN and TARGET_END.
#pragma once
#define TARGET_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define TARGET_BEGIN(features) \
  TARGET_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define TARGET_END TARGET_PRAGMA(clang attribute pop)
#else
#define TARGET_BEGIN(features) TARGET_PRAGMA(GCC push_options) TARGET_PRAGMA(GCC target(features))
#define TARGET_END TARGET_PRAGMA(GCC pop_options)
#endif
#define INLINE_MEMBER __attribute__((always_inline))
#define INLINE static inline INLINE_MEMBER

// Keeps a loaded vector in its register; without it gcc loads it again at every use.
#define HOLD(v) asm("" : "+v"(v))
