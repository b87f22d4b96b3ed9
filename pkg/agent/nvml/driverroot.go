// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"cmp"
	"debug/elf"
	"fmt"
	"path/filepath"
	"regexp"
	"strings"
)

// driverRoots are where a driver's files may be on a host: installed there, in the GPU operator's driver container, or as GKE installs it.
var driverRoots = []string{"/", "/run/nvidia/driver", "/home/kubernetes/bin/nvidia"}

// FindDriverRoot looks for a driver's files on the host whose root folder this program sees in hostRoot, and returns the driver's root as
// the host names it. Of several it is the one whose library has the version of the driver that the kernel has loaded, or the first. Where
// there is none yet it returns "/" and false.
func FindDriverRoot(hostRoot, procRoot string) (onHost string, found bool) {
	loaded := KernelDriverVersion(procRoot)
	for _, root := range driverRoots {
		path, ok := findLibrary(filepath.Join(hostRoot, root))
		if !ok {
			continue
		}
		if !found {
			onHost, found = root, true
		}
		if loaded != "" && LibraryVersion(path) == loaded {
			return root, true
		}
	}
	return cmp.Or(onHost, "/"), found
}

// DriverRoots are the folders of a host in which a driver is looked for.
func DriverRoots() string { return strings.Join(driverRoots, ", ") }

// LibraryAt is the path of the library below a driver's root; empty if there is none.
func LibraryAt(driverRoot string) string {
	if path, found := findLibrary(driverRoot); found {
		return path
	}
	return ""
}

var driverVersionForm = regexp.MustCompile(`\b[0-9]{3,}(?:\.[0-9]+){1,2}\b`)

// KernelDriverVersion is that of the driver that the kernel has loaded, such as "570.172.08"; empty if none is, or if that cannot be told.
func KernelDriverVersion(procRoot string) string {
	loaded, line, err := RealDriverLoaded(procRoot)
	if err != nil || !loaded {
		return ""
	}
	return driverVersionForm.FindString(line)
}

// LibraryVersion is what the name of the library's file says, such as "570.172.08" for libnvidia-ml.so.570.172.08, to which
// libnvidia-ml.so.1 links; empty if it says nothing.
func LibraryVersion(path string) string {
	file, err := filepath.EvalSymlinks(path)
	if err != nil {
		return ""
	}
	_, suffix, _ := strings.Cut(filepath.Base(file), ".so.")
	return driverVersionForm.FindString(suffix)
}

// CheckLibrary returns an error for a library that is not wholly there, as while a driver is being installed: the dynamic loader would map
// what is not in the file, and the process would end with the first access to it. What comes last in the file is looked for.
func CheckLibrary(path string) error {
	file, err := elf.Open(path)
	if err != nil {
		return fmt.Errorf("library %s is not whole, as while a driver is being installed: %w", path, err)
	}
	return file.Close()
}
