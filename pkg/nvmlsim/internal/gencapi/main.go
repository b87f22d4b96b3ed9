// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Command gencapi writes the C functions of the simulated library: for each
// function of nvml.h that package nvmlsim answers, an exported Go function that
// takes C's arguments, and for each other one a stub in C.
//
// The functions come from nvml.h in the go-nvml version of go.mod, their Go
// methods from reflection over go-nvml, and which of them are answered from the
// source of package nvmlsim. A function that is answered and fits no rule below
// has to be written by hand in package capi: the generation fails until it is.
package main

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

func main() {
	out := flag.String("o", "", "folder of package capi")
	flag.Parse()
	if err := run(*out); err != nil {
		fmt.Fprintln(os.Stderr, "gencapi:", err)
		os.Exit(1)
	}
}

func run(out string) error {
	if out == "" {
		return errors.New("flag -o: want the folder of package capi")
	}
	files, err := generate(out)
	if err != nil {
		return err
	}
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(out, name), content, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// generate returns the files of package capi, by name. It reads what is written
// by hand there, and the simulation, which is the folder above.
func generate(capi string) (map[string][]byte, error) {
	text, err := readHeader()
	if err != nil {
		return nil, err
	}
	h, err := parseHeader(text)
	if err != nil {
		return nil, err
	}
	byHand, err := exportsIn(capi)
	if err != nil {
		return nil, err
	}
	for name := range byHand {
		if _, ok := h.byName[name]; !ok {
			return nil, fmt.Errorf("%s is exported by hand, and nvml.h has no such function", name)
		}
	}
	answered, err := methodsIn(filepath.Join(capi, ".."))
	if err != nil {
		return nil, err
	}
	return write(h, byHand, answered)
}

// readHeader returns nvml.h as the go-nvml module has it.
func readHeader() (string, error) {
	var stderr bytes.Buffer
	list := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "github.com/NVIDIA/go-nvml")
	list.Stderr = &stderr
	dir, err := list.Output()
	if err != nil {
		return "", fmt.Errorf("look for the module go-nvml: %w: %s", err, stderr.Bytes())
	}
	text, err := os.ReadFile(filepath.Join(string(bytes.TrimSpace(dir)), "pkg", "nvml", "nvml.h"))
	return string(text), err
}
