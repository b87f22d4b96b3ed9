// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package install

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// What a library that was installed does is tried in cmd/nvmlsim-library.

// libraryOf is the smallest file that can be installed: two functions, of which drivers of branch 570 lack one, and the array
// with what it holds. change is made to its parts.
func libraryOf(t testing.TB, holds string, change func(symbols []elf.Sym64, sections []elf.Section64)) []byte {
	t.Helper()
	const base, array = 64, 32 // where the content begins, and how long the array is
	names, headings := "\x00nvmlsimDriver\x00nvmlInit_v2\x00nvmlDeviceGetAddressingMode\x00", "\x00.dynsym\x00.dynstr\x00.rodata\x00.shstrtab\x00"
	at := func(in, what string) uint32 { return uint32(strings.Index(in, "\x00"+what+"\x00") + 1) }
	const shared = byte(elf.STB_GLOBAL) << 4
	symbols := []elf.Sym64{
		{},
		{Name: at(names, "nvmlInit_v2"), Info: shared | byte(elf.STT_FUNC), Shndx: 3, Value: base},
		{Name: at(names, "nvmlDeviceGetAddressingMode"), Info: shared | byte(elf.STT_FUNC), Shndx: 3, Value: base},
		{Name: at(names, versionSymbol), Info: shared | byte(elf.STT_OBJECT), Shndx: 3, Value: base, Size: array},
	}
	strtab := uint64(base + array)
	headingsAt := strtab + uint64(len(names))
	table := headingsAt + uint64(len(headings))
	sectionsAt := table + uint64(len(symbols))*elf.Sym64Size
	sections := []elf.Section64{
		{},
		{Name: at(headings, ".dynsym"), Type: uint32(elf.SHT_DYNSYM), Off: table, Size: uint64(len(symbols)) * elf.Sym64Size, Link: 2, Entsize: elf.Sym64Size},
		{Name: at(headings, ".dynstr"), Type: uint32(elf.SHT_STRTAB), Off: strtab, Size: uint64(len(names))},
		{Name: at(headings, ".rodata"), Type: uint32(elf.SHT_PROGBITS), Addr: base, Off: base, Size: array},
		{Name: at(headings, ".shstrtab"), Type: uint32(elf.SHT_STRTAB), Off: headingsAt, Size: uint64(len(headings))},
	}
	if change != nil {
		change(symbols, sections)
	}
	header := elf.Header64{
		Ident:   [elf.EI_NIDENT]byte{0x7f, 'E', 'L', 'F', byte(elf.ELFCLASS64), byte(elf.ELFDATA2LSB), byte(elf.EV_CURRENT)},
		Type:    uint16(elf.ET_DYN),
		Machine: uint16(elf.EM_X86_64), Version: uint32(elf.EV_CURRENT), Ehsize: base, Shoff: sectionsAt,
		Shentsize: uint16(binary.Size(elf.Section64{})), Shnum: uint16(len(sections)), Shstrndx: 4,
	}
	var file bytes.Buffer
	for _, written := range []any{&header, [array]byte([]byte(holds + strings.Repeat("\x00", array-len(holds)))), []byte(names), []byte(headings), symbols, sections} {
		if err := binary.Write(&file, binary.LittleEndian, written); err != nil {
			t.Fatal(err)
		}
	}
	return file.Bytes()
}

func TestALibraryIsMadeOfAVersion(t *testing.T) {
	content := libraryOf(t, anyVersion, nil)
	if err := edit(content, "570.172.08"); err != nil {
		t.Fatal(err)
	}
	file, err := elf.NewFile(bytes.NewReader(content))
	if err != nil {
		t.Fatal(err)
	}
	array, err := file.Section(".rodata").Data()
	if got := strings.TrimRight(string(array), "\x00"); err != nil || got != "570.172.08" {
		t.Errorf("it is of %q, %v", got, err)
	}
	symbols, err := file.DynamicSymbols()
	if err != nil {
		t.Fatal(err)
	}
	for _, symbol := range symbols {
		if hidden := symbol.Section == elf.SHN_UNDEF; hidden != (symbol.Name == "nvmlDeviceGetAddressingMode") {
			t.Errorf("%s: hidden %t", symbol.Name, hidden)
		}
	}
	if err := edit(content, "580.65.06"); !errors.Is(err, ErrNotSimulated) || !strings.Contains(err.Error(), `holds "570.172.08", want "any"`) {
		t.Errorf("made of another version: %v, want %v that says which it is of", err, ErrNotSimulated)
	}
}

func TestABrokenLibraryIsRefused(t *testing.T) {
	const dynsym, rodata, hidden, version = 1, 3, 2, 3
	tests := map[string]struct {
		holds  string
		change func(symbols []elf.Sym64, sections []elf.Section64)
		says   string
	}{
		"it was made of a version":       {"535.1", nil, `holds "535.1", want "any"`},
		"the array holds nothing":        {"", nil, `holds "", want "any"`},
		"something follows the mark":     {"any\x00more", nil, `holds "any\x00more"`},
		"the array is not of it":         {"any", func(s []elf.Sym64, _ []elf.Section64) { s[version].Shndx = 0 }, "in section 0"},
		"the array is in no section":     {"any", func(s []elf.Sym64, _ []elf.Section64) { s[version].Shndx = 99 }, "in section 99"},
		"the array is short":             {"any", func(s []elf.Sym64, _ []elf.Section64) { s[version].Size = 5 }, "5 bytes"},
		"the array is too long":          {"any", func(s []elf.Sym64, _ []elf.Section64) { s[version].Size = 1 << 62 }, "beyond the file's end"},
		"the array begins behind it":     {"any", func(s []elf.Sym64, _ []elf.Section64) { s[version].Value = 1 << 40 }, "beyond the file's end"},
		"the array begins in front":      {"any", func(_ []elf.Sym64, s []elf.Section64) { s[rodata].Addr = 1 << 40 }, "beyond the file's end"},
		"the table is not in the file":   {"any", func(_ []elf.Sym64, s []elf.Section64) { s[dynsym].Off = 1 << 40 }, "not a simulated"},
		"the table has no whole entries": {"any", func(_ []elf.Sym64, s []elf.Section64) { s[dynsym].Size-- }, "not a simulated"},
		"no name of the version":         {"any", func(s []elf.Sym64, _ []elf.Section64) { s[version].Name = s[hidden].Name }, "no symbol nvmlsimDriver"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			if err := edit(libraryOf(t, test.holds, test.change), "570.1"); !errors.Is(err, ErrNotSimulated) || !strings.Contains(err.Error(), test.says) {
				t.Errorf("%v, want %v that says %q", err, ErrNotSimulated, test.says)
			}
		})
	}
}

// A file that ends sooner, or of which one byte is another, is made of the version or refused.
func TestNoBrokenByteIsTooMuch(t *testing.T) {
	whole := libraryOf(t, anyVersion, nil)
	check := func(what string, content []byte) {
		t.Helper()
		defer func() {
			if r := recover(); r != nil {
				t.Errorf("%s: %v", what, r)
			}
		}()
		if err := edit(content, "570.1"); err != nil && !errors.Is(err, ErrNotSimulated) {
			t.Errorf("%s: %v, want %v", what, err, ErrNotSimulated)
		}
	}
	for i := range whole {
		check(fmt.Sprintf("%d bytes", i), bytes.Clone(whole[:i]))
		for _, value := range []byte{0, 1, 0x7f, 0x80, 0xff} {
			content := bytes.Clone(whole)
			content[i] = value
			check(fmt.Sprintf("byte %d is %#x", i, value), content)
		}
	}
}

func FuzzEdit(f *testing.F) {
	f.Add(libraryOf(f, anyVersion, nil), "570.172.08")
	f.Add(libraryOf(f, "535.1", nil), "580.65.06")
	f.Add([]byte("text"), "570.1")
	f.Fuzz(func(t *testing.T, content []byte, version string) {
		length := len(content)
		if err := edit(content, version); err == nil && (len(content) != length || !bytes.Contains(content, []byte(version))) {
			t.Errorf("%d bytes of %d, and the version %q is in it: %t", len(content), length, version, bytes.Contains(content, []byte(version)))
		}
	})
}

func TestWhatCannotBeInstalledIsRefused(t *testing.T) {
	write := func(content []byte) string {
		path := filepath.Join(t.TempDir(), "library")
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	self, err := os.ReadFile(os.Args[0])
	if err != nil {
		t.Fatal(err)
	}
	to := filepath.Join(t.TempDir(), "libnvidia-ml.so.1")
	tests := map[string]struct {
		from, version string
		is            error
		says          string
	}{
		"a version of no form":      {write(self), "570", nil, `driver version "570": want one such as 570.172.08`},
		"no version":                {write(self), "", nil, `driver version ""`},
		"no file":                   {filepath.Join(t.TempDir(), "none"), "570.1", os.ErrNotExist, "none"},
		"no library":                {write([]byte("text")), "570.1", ErrNotSimulated, "library: not a simulated"},
		"a program that is no NVML": {write(self), "570.1", ErrNotSimulated, "library: not a simulated"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			err := Library(test.from, to, test.version)
			if err == nil || test.is != nil && !errors.Is(err, test.is) || !strings.Contains(err.Error(), test.says) {
				t.Errorf("%v, want %v that says %q", err, test.is, test.says)
			}
			if left, err := os.ReadDir(filepath.Dir(to)); err != nil || len(left) > 0 {
				t.Errorf("%v is left, %v", left, err)
			}
		})
	}
}

func TestWhatADriverLacks(t *testing.T) {
	for _, test := range []struct {
		function, version string
		missing           bool
	}{
		{"nvmlInit_v2", "450.1", false},
		{"nvmlDeviceGetAddressingMode", "575.57.08", true},
		{"nvmlDeviceGetAddressingMode", "580.65.06", false},
		{"nvmlDeviceGetMarginTemperature", "570.172.08", false},
		{"nvmlDeviceGetMarginTemperature", "565.57.01", true},
		{"nvmlDeviceGetAddressingMode", "any", false},
	} {
		if got := Missing(test.function, test.version); got != test.missing {
			t.Errorf("%s in %s: missing %t, want %t", test.function, test.version, got, test.missing)
		}
	}
}
