/* The part of numba's runtime that compiled kernels use: reference-counted memory of temporary arrays. The kernels
 * themselves count references. Functions that raise Python exceptions are missing, so calling one ends the
 * process. */
#include <stddef.h>
#include <stdlib.h>

struct mem_info { /* the fields that compiled code reads have these offsets */
	size_t references;
	void *destructor;
	void *destructor_argument;
	void *data;
	size_t size;
};

void *PyExc_RuntimeError, *PyExc_StopIteration, *PyExc_SystemError;

struct mem_info *NRT_MemInfo_alloc_aligned(size_t size, unsigned alignment)
{
	struct mem_info *info = malloc(sizeof *info);

	if (!info)
		abort();
	*info = (struct mem_info){.references = 1, .size = size};
	if (posix_memalign(&info->data, alignment < sizeof(void *) ? sizeof(void *) : alignment, size ? size : 1))
		abort();
	return info;
}

void NRT_MemInfo_call_dtor(struct mem_info *info)
{
	free(info->data);
	free(info);
}

void NRT_Free(void *memory)
{
	free(memory);
}
