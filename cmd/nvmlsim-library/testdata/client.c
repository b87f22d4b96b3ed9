// A program that finds NVML as others do: by the dynamic loader. It does what it is told on its standard input, a word at a
// time, and says how that ended.
//
//   open PATH, close    the library
//   init, shutdown      a session
//   list                GPUs, their MIG devices and processes
//   lack NAME           whether the library lacks a function

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "nvml.h"

static void *library;

static void *function(const char *name) {
	void *f = library == NULL ? NULL : dlsym(library, name);
	if (f == NULL) {
		printf("no function %s\n", name);
		exit(1);
	}
	return f;
}

#define CALL(name) ((__typeof__(name) *)function(#name))

static int failed(const char *what, nvmlReturn_t ret) {
	if (ret != NVML_SUCCESS) {
		printf("%s: %s\n", what, CALL(nvmlErrorString)(ret));
	}
	return ret != NVML_SUCCESS;
}

static void processes(nvmlDevice_t device) {
	nvmlProcessInfo_t infos[8];
	unsigned int count = 8;
	if (failed("processes", CALL(nvmlDeviceGetComputeRunningProcesses_v3)(device, &count, infos))) {
		return;
	}
	for (unsigned int i = 0; i < count; i++) {
		printf("    process %u %llu\n", infos[i].pid, infos[i].usedGpuMemory);
	}
}

static void list(void) {
	unsigned int count = 0;
	if (failed("count", CALL(nvmlDeviceGetCount_v2)(&count))) {
		return;
	}
	for (unsigned int i = 0; i < count; i++) {
		nvmlDevice_t gpu, mig;
		char name[NVML_DEVICE_NAME_V2_BUFFER_SIZE], uuid[NVML_DEVICE_UUID_V2_BUFFER_SIZE];
		nvmlPciInfo_t pci;
		nvmlMemory_v2_t memory = {.version = nvmlMemory_v2};
		nvmlDeviceAttributes_t attributes;
		unsigned int devices = 0;
		if (failed("GPU", CALL(nvmlDeviceGetHandleByIndex_v2)(i, &gpu)) || failed("name", CALL(nvmlDeviceGetName)(gpu, name, sizeof name)) ||
			failed("UUID", CALL(nvmlDeviceGetUUID)(gpu, uuid, sizeof uuid)) || failed("PCI", CALL(nvmlDeviceGetPciInfo_v3)(gpu, &pci)) ||
			failed("memory", CALL(nvmlDeviceGetMemoryInfo_v2)(gpu, &memory)) || failed("MIG", CALL(nvmlDeviceGetMaxMigDeviceCount)(gpu, &devices))) {
			continue;
		}
		printf("%u %s %s %s %llu %llu\n", i, name, uuid, pci.busId, memory.total, memory.reserved);
		processes(gpu);
		for (unsigned int j = 0; j < devices; j++) {
			nvmlReturn_t ret = CALL(nvmlDeviceGetMigDeviceHandleByIndex)(gpu, j, &mig);
			if (ret == NVML_ERROR_NOT_FOUND) {
				break;
			}
			if (failed("MIG device", ret) || failed("name", CALL(nvmlDeviceGetName)(mig, name, sizeof name)) ||
				failed("UUID", CALL(nvmlDeviceGetUUID)(mig, uuid, sizeof uuid)) || failed("attributes", CALL(nvmlDeviceGetAttributes_v2)(mig, &attributes))) {
				break;
			}
			printf("  %u %s %s %llu %u\n", j, name, uuid, attributes.memorySizeMB, attributes.multiprocessorCount);
			processes(mig);
		}
	}
}

int main(void) {
	char word[32], argument[4096];
	while (scanf("%31s", word) == 1) {
		if (strcmp(word, "open") == 0 && scanf("%4095s", argument) == 1) {
			library = dlopen(argument, RTLD_LAZY | RTLD_GLOBAL);
			puts(library == NULL ? dlerror() : "opened");
		} else if (strcmp(word, "close") == 0) {
			puts(dlclose(library) == 0 ? "closed" : dlerror());
			library = NULL;
		} else if (strcmp(word, "init") == 0) {
			puts(CALL(nvmlErrorString)(CALL(nvmlInit_v2)()));
		} else if (strcmp(word, "shutdown") == 0) {
			puts(CALL(nvmlErrorString)(CALL(nvmlShutdown)()));
		} else if (strcmp(word, "list") == 0) {
			list();
			puts("listed");
		} else if (strcmp(word, "lack") == 0 && scanf("%4095s", argument) == 1) {
			puts(dlsym(library, argument) == NULL ? "lacking" : "there");
		} else {
			printf("what is %s?\n", word);
		}
		fflush(stdout);
	}
	return 0;
}
