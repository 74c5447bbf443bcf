// Included before every source: names old versions of some functions of glibc, so that what is built
// on a new system runs on systems from glibc 2.28 on. The functions are the same but for errno.
#pragma once

#if defined(__x86_64__) && defined(__gnu_linux__)
__asm__(".symver log,log@GLIBC_2.2.5");
__asm__(".symver pthread_setaffinity_np,pthread_setaffinity_np@GLIBC_2.3.4");
#elif defined(__aarch64__) && defined(__gnu_linux__)
__asm__(".symver log,log@GLIBC_2.17");
__asm__(".symver pthread_setaffinity_np,pthread_setaffinity_np@GLIBC_2.17");
#endif
