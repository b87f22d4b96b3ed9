// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
)

var (
	// errTruncated is what a file that ends too early has.
	errTruncated = errors.New("it ends too early")
	errTooMany   = fmt.Errorf("more than %d objects", MaxObjects)
)

// atOnce is how many elements of a list are handed on together.
const atOnce = 256

// parts are the members of a file: how many elements each list has, and the other fields as they are.
type parts struct {
	lists  map[string]int
	fields map[string]json.RawMessage
	// notList is the error that a list is none, which a file of another version may have.
	notList error
}

// members divides an object in JSON into its members, and those that are lists into their elements, without looking into these: they are
// checked when they are decoded, which may begin when they are handed on, some at once, with the index of the first. A large file is so
// read once, where a general decoder goes over it five times.
func members(content []byte, isList func(name string) bool,
	handOn func(name string, first int, elements []json.RawMessage),
) (*parts, error) {
	p := &parts{lists: map[string]int{}, fields: map[string]json.RawMessage{}}
	rest, err := divide(content, '{', '}', func(rest []byte) ([]byte, error) {
		end, err := endOf(rest)
		if err != nil {
			return nil, err
		}
		var name string
		if err := json.Unmarshal(rest[:end], &name); err != nil {
			return nil, fmt.Errorf("the name of a field: %w", err)
		}
		rest = bytes.TrimLeft(rest[end:], " \t\r\n")
		if len(rest) == 0 || rest[0] != ':' {
			return nil, fmt.Errorf("%s: no colon follows", name)
		}
		rest = bytes.TrimLeft(rest[1:], " \t\r\n")
		if p.has(name) {
			return nil, fmt.Errorf("%s: duplicate field", name)
		}
		if isList(name) && bytes.HasPrefix(rest, []byte("[")) {
			p.lists[name], rest, err = elements(rest, func(first int, some []json.RawMessage) { handOn(name, first, some) })
			if err != nil {
				return nil, fmt.Errorf("%s: %w", name, err)
			}
			return rest, nil
		}
		if end, err = endOf(rest); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		if isList(name) {
			p.lists[name], p.notList = 0, fmt.Errorf("%s: want a list", name)
		} else {
			p.fields[name] = rest[:end]
		}
		return rest[end:], nil
	})
	if err == nil && len(bytes.TrimLeft(rest, " \t\r\n")) > 0 {
		err = errors.New("something follows its end")
	}
	return p, err
}

func (p *parts) has(name string) bool {
	_, list := p.lists[name]
	_, field := p.fields[name]
	return list || field
}

// elements divides an array in JSON into its elements, MaxObjects at most. It returns how many there are, and what is left behind the
// array.
func elements(content []byte, handOn func(first int, some []json.RawMessage)) (n int, rest []byte, err error) {
	var some []json.RawMessage
	rest, err = divide(content, '[', ']', func(rest []byte) ([]byte, error) {
		end, err := endOf(rest)
		if err != nil {
			return nil, err
		}
		if n++; n > MaxObjects {
			return nil, errTooMany
		}
		if some = append(some, rest[:end]); len(some) == atOnce {
			handOn(n-len(some), some)
			some = make([]json.RawMessage, 0, atOnce)
		}
		return rest[end:], nil
	})
	if err == nil {
		handOn(n-len(some), some)
	}
	return n, rest, err
}

// divide calls part, which returns what is left behind the part, for each part between the brackets. It returns what is left behind these.
func divide(content []byte, open, shut byte, part func([]byte) ([]byte, error)) ([]byte, error) {
	rest := bytes.TrimLeft(content, " \t\r\n")
	if len(rest) == 0 || rest[0] != open {
		return nil, fmt.Errorf("want %q first", string(open))
	}
	rest = bytes.TrimLeft(rest[1:], " \t\r\n")
	for first := true; ; first = false {
		switch {
		case len(rest) == 0:
			return nil, errTruncated
		case rest[0] == shut:
			return rest[1:], nil
		case !first && rest[0] != ',':
			return nil, fmt.Errorf("want a comma, have %q", rest[:1])
		case !first:
			rest = bytes.TrimLeft(rest[1:], " \t\r\n")
		}
		var err error
		if rest, err = part(rest); err != nil {
			return nil, err
		}
		rest = bytes.TrimLeft(rest, " \t\r\n")
	}
}

// endOf returns the length of the value that content begins with.
func endOf(content []byte) (int, error) {
	depth := 0
	for i := 0; i < len(content); i++ {
		switch content[i] {
		case '"':
			end := stringEnd(content[i+1:])
			if end < 0 {
				return 0, errTruncated
			}
			if i += 1 + end; depth == 0 {
				return i + 1, nil
			}
		case '{', '[':
			depth++
		case '}', ']':
			if depth--; depth == 0 {
				return i + 1, nil
			} else if depth < 0 {
				return wordEnd(i)
			}
		case ',', ' ', '\t', '\r', '\n':
			if depth == 0 {
				return wordEnd(i)
			}
		}
	}
	return 0, errTruncated
}

// stringEnd is where the quote is that ends a string, negative if there is none. A quote behind an odd number of backslashes is part of it.
func stringEnd(content []byte) int {
	for from := 0; ; {
		quote := bytes.IndexByte(content[from:], '"')
		if quote < 0 {
			return -1
		}
		quote += from
		escapes := 0
		for quote-escapes > 0 && content[quote-escapes-1] == '\\' {
			escapes++
		}
		if escapes%2 == 0 {
			return quote
		}
		from = quote + 1
	}
}

// wordEnd is the end of a number, or of a word.
func wordEnd(i int) (int, error) {
	if i == 0 {
		return 0, errors.New("a value is missing")
	}
	return i, nil
}
