/* Makes one system call fail: preloaded by `errno_cases.py`, which arms it through `kvl_shim`.
 *
 * Only calls that Python, its modules and pyzmq make are counted and failed, not those of the C
 * library, of libzmq and of torch in between. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <stdarg.h>
#include <string.h>
#include <stddef.h>

enum { FUNCTIONS = 64 };

struct shim {
    long armed, function, number, error; /* the call with this number (from 0) fails */
    long failed;                         /* calls that did */
    long counts[FUNCTIONS];
} kvl_shim;

static int is_ours(void *caller) {
    Dl_info found;
    if (!dladdr(caller, &found) || !found.dli_fname) return 0;
    if (strstr(found.dli_fname, "site-packages"))
        return strstr(found.dli_fname, "/zmq/backend/") && !strstr(found.dli_fname, ".libs/");
    return strstr(found.dli_fname, "python") || strstr(found.dli_fname, "libffi") ||
           !strcmp(found.dli_fname, "");
}

static int due(int function, void *caller) {
    if (!kvl_shim.armed || !is_ours(caller)) return 0;
    long number = __atomic_fetch_add(&kvl_shim.counts[function], 1, __ATOMIC_SEQ_CST);
    if (function != kvl_shim.function || number != kvl_shim.number) return 0;
    __atomic_fetch_add(&kvl_shim.failed, 1, __ATOMIC_SEQ_CST);
    return (int)kvl_shim.error;
}

static int is_zmq(struct dl_phdr_info *library, size_t size, void *handle) {
    if (!strstr(library->dlpi_name, "libzmq")) return 0;
    *(void **)handle = dlopen(library->dlpi_name, RTLD_NOW | RTLD_NOLOAD);
    return 1;
}

/* The function that is called without this library; libzmq is no library of the whole process. */
static void *find(const char *name) {
    void *found = dlsym(RTLD_NEXT, name), *zmq = NULL;
    if (!found && dl_iterate_phdr(is_zmq, &zmq) && zmq) found = dlsym(zmq, name);
    return found;
}

typedef const void *P;
#define FIND(name) if (!real) real = (__typeof__(real))find(#name)
#define WRAP(id, type, name, parameters, arguments, failure)                  \
    type name parameters {                                                    \
        static type(*real) parameters;                                        \
        int error = due(id, __builtin_return_address(0));                     \
        if (error) {                                                          \
            errno = error;                                                    \
            return (type)(failure);                                           \
        }                                                                     \
        FIND(name);                                                           \
        return real arguments;                                         \
    }
#define INT(id, name, parameters, arguments) WRAP(id, int, name, parameters, arguments, -1)
#define SIZE(id, name, parameters, arguments) WRAP(id, long, name, parameters, arguments, -1)
/* Functions that return the error. */
#define STATUS(id, name, parameters, arguments) WRAP(id, int, name, parameters, arguments, error)
#define VARIADIC(id, name, first)                                             \
    int name(first a, int b, ...) {                                           \
        static int (*real)(first, int, long);                                 \
        va_list rest;                                                         \
        va_start(rest, b);                                                    \
        long last = va_arg(rest, long);                                       \
        va_end(rest);                                                         \
        int error = due(id, __builtin_return_address(0));                     \
        if (error) {                                                          \
            errno = error;                                                    \
            return -1;                                                        \
        }                                                                     \
        FIND(name);                                                           \
        return real(a, b, last);                                      \
    }
VARIADIC(0, open, P)
VARIADIC(0, open64, P)
INT(1, memfd_create, (P a, unsigned b), (a, b))
INT(2, ftruncate, (int a, long b), (a, b))
INT(2, ftruncate64, (int a, long b), (a, b))
STATUS(3, posix_fallocate, (int a, long b, long c), (a, b, c))
STATUS(3, posix_fallocate64, (int a, long b, long c), (a, b, c))
#define MAP (void *a, size_t b, int c, int d, int e, long f)
/* Not the interpreter's own memory. */
#define MMAP(name)                                                            \
    void *name MAP {                                                          \
        static void *(*real)MAP;                                              \
        int is_memory = e >= 0 || b >= 4 << 20;                               \
        int error = is_memory ? due(4, __builtin_return_address(0)) : 0;      \
        if (error) {                                                          \
            errno = error;                                                    \
            return (void *)-1;                                                \
        }                                                                     \
        FIND(name);                                                           \
        return real(a, b, c, d, e, f);                                \
    }
MMAP(mmap)
MMAP(mmap64)
INT(5, socket, (int a, int b, int c), (a, b, c))
INT(6, bind, (int a, P b, unsigned c), (a, b, c))
INT(7, listen, (int a, int b), (a, b))
INT(8, connect, (int a, P b, unsigned c), (a, b, c))
INT(9, accept4, (int a, P b, P c, int d), (a, b, c, d))
SIZE(10, sendmsg, (int a, P b, int c), (a, b, c))
SIZE(11, recvmsg, (int a, P b, int c), (a, b, c))
SIZE(12, send, (int a, P b, size_t c, int d), (a, b, c, d))
SIZE(13, recv, (int a, P b, size_t c, int d), (a, b, c, d))
INT(14, setsockopt, (int a, int b, int c, P d, unsigned e), (a, b, c, d, e))
INT(15, getsockopt, (int a, int b, int c, P d, P e), (a, b, c, d, e))
INT(16, epoll_create1, (int a), (a))
INT(17, epoll_ctl, (int a, int b, int c, P d), (a, b, c, d))
INT(18, eventfd, (unsigned a, int b), (a, b))
INT(19, unlink, (P a), (a))
INT(20, mkdir, (P a, unsigned b), (a, b))
INT(21, chmod, (P a, unsigned b), (a, b))
INT(21, fchmod, (int a, unsigned b), (a, b))
INT(22, stat, (P a, P b), (a, b))
INT(22, stat64, (P a, P b), (a, b))
INT(22, lstat, (P a, P b), (a, b))
INT(22, lstat64, (P a, P b), (a, b))
INT(23, fstat, (int a, P b), (a, b))
INT(23, fstat64, (int a, P b), (a, b))
VARIADIC(24, fcntl, int)
VARIADIC(24, fcntl64, int)
INT(25, flock, (int a, int b), (a, b))
INT(26, rename, (P a, P b), (a, b))
INT(27, fsync, (int a), (a))
SIZE(28, write, (int a, P b, size_t c), (a, b, c))
SIZE(29, read, (int a, P b, size_t c), (a, b, c))
STATUS(30, pthread_create, (P a, P b, P c, P d), (a, b, c, d))
INT(31, getsockname, (int a, P b, P c), (a, b, c))
WRAP(32, void *, zmq_ctx_new, (void), (), 0)
WRAP(33, void *, zmq_socket, (P a, int b), (a, b), 0)
INT(34, zmq_bind, (P a, P b), (a, b))
INT(35, zmq_connect, (P a, P b), (a, b))
INT(36, zmq_setsockopt, (P a, int b, P c, size_t d), (a, b, c, d))
INT(37, zmq_getsockopt, (P a, int b, P c, P d), (a, b, c, d))
/* A ROUTER's message may have no route, which its first frame tells; that of another socket has. */
int zmq_msg_send(P message, P socket, int flags) {
    static __thread P unfinished; /* the socket whose message has more frames */
    static int (*real)(P, P, int), (*option)(P, int, void *, size_t *);
    int type = 0, error = 0;
    size_t nbytes = sizeof type;
    if (!option) option = (__typeof__(option))find("zmq_getsockopt");
    if (socket != unfinished && !option(socket, 16, &type, &nbytes) && type == 6)
        error = due(38, __builtin_return_address(0));
    unfinished = !error && flags & 2 ? socket : NULL;
    if (error) {
        errno = error;
        return -1;
    }
    FIND(zmq_msg_send);
    return real(message, socket, flags);
}
INT(39, zmq_msg_recv, (P a, P b, int c), (a, b, c))
INT(40, zmq_socket_monitor, (P a, P b, int c), (a, b, c))
INT(41, link, (P a, P b), (a, b))
INT(42, rmdir, (P a), (a))
INT(43, access, (P a, int b), (a, b))
