// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Command runc is runc without seccomp: it takes the filter out of the container's configuration and becomes the runc in PATH.
//
// The kubelet asks for the default filter for every sandbox, containerd adds it wherever the kernel knows filters, and a runc that
// was built without libseccomp refuses such a container. The C library's headers are not on every machine, and containers of a
// test need no filter.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if bundle := bundleOf(args); bundle != "" {
		if err := removeFilter(filepath.Join(bundle, "config.json")); err != nil {
			return fmt.Errorf("removing the seccomp filter: %w", err)
		}
	}
	path, err := exec.LookPath("runc")
	if err != nil {
		return err
	}
	if err := syscall.Exec(path, append([]string{path}, args...), os.Environ()); err != nil {
		return fmt.Errorf("executing %s: %w", path, err)
	}
	return nil
}

// bundleOf finds the container's folder in a "create" command as the shim writes it.
func bundleOf(args []string) string {
	if !slices.Contains(args, "create") {
		return ""
	}
	i := slices.Index(args, "--bundle")
	if i < 0 || i+1 == len(args) {
		return ""
	}
	return args[i+1]
}

// removeFilter changes nothing else in the file, whatever fields this program knows.
func removeFilter(path string) error {
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var config map[string]json.RawMessage
	if err := json.Unmarshal(data, &config); err != nil {
		return err
	}
	var linux map[string]json.RawMessage
	if err := json.Unmarshal(config["linux"], &linux); err != nil {
		return err
	}
	if _, has := linux["seccomp"]; !has {
		return nil
	}
	delete(linux, "seccomp")
	if config["linux"], err = json.Marshal(linux); err != nil {
		return err
	}
	if data, err = json.Marshal(config); err != nil {
		return err
	}
	return os.WriteFile(path, data, 0o600)
}
