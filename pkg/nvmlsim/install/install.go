// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package install puts the simulated libnvidia-ml.so.1 where a driver would
// have its own, as the library of one version: it answers only to a kernel
// driver of that version, and it lacks the functions that the version does not
// have. No compiler is needed for that.
package install

import (
	"bytes"
	"debug/elf"
	_ "embed"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
)

//go:embed since.txt
var sinceText string

// since is the first branch that has a function, where that is not older than all branches in use.
var since = sync.OnceValue(func() map[string]int {
	branches := map[string]int{}
	for line := range strings.Lines(sinceText) {
		if strings.HasPrefix(line, "#") {
			continue
		}
		number, function, _ := strings.Cut(strings.TrimSpace(line), " ")
		branch, err := strconv.Atoi(number)
		if err != nil {
			panic("since.txt: " + line)
		}
		branches[function] = branch
	}
	return branches
})

var (
	versionForm = regexp.MustCompile(`^([0-9]+)(\.[0-9]+){1,2}$`)
	// ErrNotSimulated means that a file is not what make nvml-library builds.
	ErrNotSimulated = errors.New("not a simulated NVML library")
)

// versionSymbol is the array that holds the version, with its end, and anyVersion what it holds as it was built: the library
// serves every kernel driver, and has all functions.
const (
	versionSymbol = "nvmlsimDriver"
	anyVersion    = "any"
)

// Library writes the library of a driver version, such as "570.172.08", to a
// file. A file that is there is replaced, as a package manager does it: who has
// it open keeps the old one. from is the library as it was built: one of a
// version lacks functions already, and is [ErrNotSimulated].
func Library(from, to, version string) error {
	content, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	if err := edit(content, version); err != nil {
		return fmt.Errorf("%s: %w", from, err)
	}
	return replace(to, content)
}

// Missing tells whether a driver of that version lacks a function of nvml.h.
func Missing(function, version string) bool {
	parts := versionForm.FindStringSubmatch(version)
	if parts == nil {
		return false
	}
	branch, err := strconv.Atoi(parts[1])
	return err == nil && since()[function] > branch
}

func edit(content []byte, version string) error {
	if !versionForm.MatchString(version) {
		return fmt.Errorf("driver version %q: want one such as 570.172.08", version)
	}
	file, err := elf.NewFile(bytes.NewReader(content))
	if err != nil {
		return fmt.Errorf("%w: %w", ErrNotSimulated, err)
	}
	symbols, err := file.DynamicSymbols()
	table := file.SectionByType(elf.SHT_DYNSYM) // which DynamicSymbols reads
	if err != nil || table == nil || file.Class != elf.ELFCLASS64 {
		return fmt.Errorf("%w: %w", ErrNotSimulated, errors.Join(err, errors.New("want a shared library of 64 bits")))
	}
	stamped := false
	for i, symbol := range symbols {
		if symbol.Name == versionSymbol {
			if err := stamp(content, file, symbol, version); err != nil {
				return err
			}
			stamped = true
		}
		if Missing(symbol.Name, version) {
			// The first entry of the table is none, and not among the symbols.
			entry, err := part(content, table.Offset+uint64(i+1)*elf.Sym64Size, elf.Sym64Size)
			if err != nil {
				return fmt.Errorf("symbol %s: %w", symbol.Name, err)
			}
			hide(file.ByteOrder, entry)
		}
	}
	if !stamped {
		return fmt.Errorf("%w: it has no symbol %s", ErrNotSimulated, versionSymbol)
	}
	return nil
}

func stamp(content []byte, file *elf.File, symbol elf.Symbol, version string) error {
	if symbol.Section == elf.SHN_UNDEF || int(symbol.Section) >= len(file.Sections) || uint64(len(version)) >= symbol.Size {
		return fmt.Errorf("%w: %s has %d bytes in section %d", ErrNotSimulated, versionSymbol, symbol.Size, symbol.Section)
	}
	section := file.Sections[symbol.Section]
	array, err := part(content, section.Offset+symbol.Value-section.Addr, symbol.Size)
	if err != nil {
		return fmt.Errorf("%s: %w", versionSymbol, err)
	}
	if held := bytes.TrimRight(array, "\x00"); string(held) != anyVersion {
		return fmt.Errorf("%w as it was built: %s holds %q, want %q", ErrNotSimulated, versionSymbol, held[:min(len(held), maxHeld)], anyVersion)
	}
	clear(array)
	copy(array, version)
	return nil
}

// maxHeld is how much is said of an array that may hold anything.
const maxHeld = 32

// part of a file's content. The offset is a sum of what the file says, and may have wrapped.
func part(content []byte, offset, size uint64) ([]byte, error) {
	if length := uint64(len(content)); offset > length || size > length-offset {
		return nil, fmt.Errorf("%w: %d bytes at %#x are beyond the file's end", ErrNotSimulated, size, offset)
	}
	return content[offset : offset+size], nil
}

// hide makes an entry of the symbol table one that is not defined here, which the dynamic loader does not find.
func hide(order binary.ByteOrder, entry []byte) {
	const info, section, value = 4, 6, 8
	entry[info] = byte(elf.STB_WEAK)<<4 | entry[info]&0xf
	order.PutUint16(entry[section:], uint16(elf.SHN_UNDEF))
	order.PutUint64(entry[value:], 0)
}

func replace(path string, content []byte) error {
	temp, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*.tmp")
	if err != nil {
		return err
	}
	_, err = temp.Write(content)
	err = errors.Join(err, temp.Chmod(0o755), temp.Close())
	if err == nil {
		err = os.Rename(temp.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(temp.Name()))
	}
	return nil
}
