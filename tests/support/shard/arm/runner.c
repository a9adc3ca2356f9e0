/* Runs compiled kernels in an emulated ARM process, on the memory of the process that started it.
 *
 * usage: runner MEMORY, a file descriptor of the other process's /proc/self/mem. Requests are read from stdin and
 * replies are written to stdout, both as 64-bit integers. The first reply, 0, follows no request.
 *
 *   'L', length, path, length, name   load a library; the reply is the address of its function, 0 if there is none
 *   'C', function, args               call void function(int64 *args); the reply is 0
 *
 * A page of the other process is copied to the same address at the first access to it. After a call, changed words
 * are written back and all copies are dropped, so the other process must wait for the reply. One thread runs. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 4096, WORDS = PAGE / 8, MAX_PAGES = 1 << 16, MAX_TEXT = 4096 };

static int memory;
static uint64_t *pages[MAX_PAGES];
static uint64_t (*originals)[WORDS];
static int num_pages;

static void stop(const char *reason, const void *address)
{
	fprintf(stderr, "runner: %s at %p\n", reason, address);
	_exit(1);
}

static void copy_page(int signal, siginfo_t *info, void *context)
{
	uint64_t *page = (uint64_t *)((uintptr_t)info->si_addr & -(uintptr_t)PAGE);

	(void)signal, (void)context;
	if (num_pages == MAX_PAGES)
		stop("too many pages in one call", page);
	if (pread(memory, originals[num_pages], PAGE, (off_t)page) != PAGE)
		stop("access outside the caller's memory", info->si_addr);
	/* Without MAP_FIXED, which would replace the emulator's own memory. */
	if (mmap(page, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != page)
		stop("the emulator occupies the caller's address", page);
	memcpy(page, originals[num_pages], PAGE);
	pages[num_pages++] = page;
}

static void write_back(uint64_t *page, const uint64_t *original)
{
	for (int first = 0, end; first < WORDS; first = end) {
		end = first + 1;
		if (page[first] == original[first])
			continue;
		while (end < WORDS && page[end] != original[end])
			end++;
		if (pwrite(memory, page + first, 8 * (end - first), (off_t)(page + first)) != 8 * (end - first))
			stop("cannot write", page + first);
	}
}

static void call(void (*kernel)(int64_t *), int64_t *args)
{
	kernel(args);
	for (int i = 0; i < num_pages; i++) {
		write_back(pages[i], originals[i]);
		munmap(pages[i], PAGE);
	}
	num_pages = 0;
}

static int64_t read_number(void)
{
	int64_t number;

	if (fread(&number, sizeof number, 1, stdin) != 1)
		exit(0); /* the other process has closed its end */
	return number;
}

static void reply(int64_t number)
{
	fwrite(&number, sizeof number, 1, stdout);
	fflush(stdout);
}

static const char *read_text(char text[MAX_TEXT])
{
	int64_t length = read_number();

	if (length < 0 || length >= MAX_TEXT || fread(text, 1, length, stdin) != (size_t)length)
		stop("broken request", NULL);
	text[length] = 0;
	return text;
}

static int64_t load(void)
{
	char path[MAX_TEXT], name[MAX_TEXT];
	/* Names that only error paths use stay unresolved. */
	void *library = dlopen(read_text(path), RTLD_LAZY | RTLD_LOCAL);
	void *function = dlsym(library, read_text(name));

	if (!library || !function)
		fprintf(stderr, "runner: %s\n", dlerror());
	return (int64_t)function;
}

int main(int argc, char **argv)
{
	struct sigaction on_fault = {.sa_sigaction = copy_page, .sa_flags = SA_SIGINFO};

	if (argc != 2)
		return 2;
	memory = atoi(argv[1]);
	originals = mmap(NULL, sizeof *originals * MAX_PAGES, PROT_READ | PROT_WRITE,
			 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (originals == MAP_FAILED || sigaction(SIGSEGV, &on_fault, NULL))
		return 2;
	reply(0);
	for (;;) {
		int64_t kind = read_number();

		if (kind == 'L') {
			reply(load());
		} else {
			int64_t function = read_number();

			call((void (*)(int64_t *))function, (int64_t *)read_number());
			reply(0);
		}
	}
}
