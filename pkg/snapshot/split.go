// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
)

var (
	// errTruncated is what a file that ends too early has.
	errTruncated = errors.New("it ends too early")
	errTooMany   = fmt.Errorf("more than %d objects", MaxObjects)
)

const (
	// atOnce is how many elements of a list are handed on together, at most.
	atOnce = 256
	// blockBytes is how much of a file is read at once. Objects of some KiB come to the decoders by the hundred.
	blockBytes = 512 << 10
)

// text is a file in JSON that is divided while it is read: of one with hundreds of megabytes a few blocks are in memory.
type text struct {
	from io.Reader // bounded by who makes the text
	// block has what was read last, and rest is its end that is not divided yet.
	block, rest []byte
	// batch are elements of a list in the block. They are handed on before the block has something else.
	batch  []json.RawMessage
	handOn func(elements []json.RawMessage, done func())
	done   sync.Pool // of *[]byte: blocks that nobody needs any more
	failed error     // of from
}

// parts are the members of a file: how many elements each list has, and the other fields as they are.
type parts struct {
	lists  map[string]int
	fields map[string]json.RawMessage
	// notList is the error that a list is none, which a file of another version may have.
	notList error
}

// members divides an object in JSON into its members, and those that are lists into their elements, without looking into these: they are
// checked when they are decoded, which may begin when they are handed on, some at once, with the index of the first. Who has decoded them
// calls done. A large file is so read once, where a general decoder goes over it five times.
func (t *text) members(isList func(name string) bool, handOn func(name string, first int, elements []json.RawMessage, done func())) (
	*parts, error,
) {
	p := &parts{lists: map[string]int{}, fields: map[string]json.RawMessage{}}
	err := t.divide('{', '}', func() error {
		quoted, err := t.value()
		if err != nil {
			return err
		}
		var name string
		if err := json.Unmarshal(quoted, &name); err != nil {
			return fmt.Errorf("the name of a field: %w", err)
		}
		if c, err := t.next(); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		} else if c != ':' {
			return fmt.Errorf("%s: no colon follows", name)
		}
		t.rest = t.rest[1:]
		c, err := t.next()
		switch {
		case err != nil:
			return fmt.Errorf("%s: %w", name, err)
		case p.has(name):
			return fmt.Errorf("%s: duplicate field", name)
		case isList(name) && c == '[':
			p.lists[name], err = t.elements(func(first int, some []json.RawMessage, done func()) { handOn(name, first, some, done) })
		case isList(name):
			_, err = t.value()
			p.lists[name], p.notList = 0, fmt.Errorf("%s: want a list", name)
		default:
			var field []byte
			field, err = t.value()
			p.fields[name] = bytes.Clone(field)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		return nil
	})
	if err == nil {
		if _, err = t.next(); err == nil {
			err = errors.New("something follows its end")
		} else if errors.Is(err, errTruncated) {
			err = nil
		}
	}
	return p, err
}

func (p *parts) has(name string) bool {
	_, list := p.lists[name]
	_, field := p.fields[name]
	return list || field
}

// elements divides an array in JSON into its elements, MaxObjects at most. It returns how many there are.
func (t *text) elements(handOn func(first int, some []json.RawMessage, done func())) (n int, err error) {
	t.handOn = func(some []json.RawMessage, done func()) { handOn(n-len(some), some, done) }
	err = t.divide('[', ']', func() error {
		element, err := t.value()
		if err != nil {
			return err
		}
		if n == MaxObjects {
			return errTooMany
		}
		n++
		if t.batch = append(t.batch, element); len(t.batch) == atOnce {
			t.flush()
		}
		return nil
	})
	if err == nil {
		t.flush()
	}
	return n, err
}

// divide calls part, which takes the part from the text, for each part between the brackets.
func (t *text) divide(open, shut byte, part func() error) error {
	if c, err := t.next(); err != nil {
		return err
	} else if c != open {
		return fmt.Errorf("want %q first", string(open))
	}
	t.rest = t.rest[1:]
	for first := true; ; first = false {
		c, err := t.next()
		switch {
		case err != nil:
			return err
		case c == shut:
			t.rest = t.rest[1:]
			return nil
		case !first && c != ',':
			return fmt.Errorf("want a comma, have %q", t.rest[:1])
		case !first:
			t.rest = t.rest[1:]
			if _, err := t.next(); err != nil {
				return err
			}
		}
		if err := part(); err != nil {
			return err
		}
	}
}

// next skips spaces and returns the byte behind them, with which the rest then begins.
func (t *text) next() (byte, error) {
	for {
		if t.rest = bytes.TrimLeft(t.rest, " \t\r\n"); len(t.rest) > 0 {
			return t.rest[0], nil
		}
		if err := t.more(); err != nil {
			return 0, err
		}
	}
}

// value takes the value with which the rest begins. It is a part of the block.
func (t *text) value() ([]byte, error) {
	for {
		end, err := endOf(t.rest)
		if err == nil {
			value := t.rest[:end:end]
			t.rest = t.rest[end:]
			return value, nil
		}
		if !errors.Is(err, errTruncated) {
			return nil, err
		}
		if err := t.more(); err != nil {
			return nil, err
		}
	}
}

// more reads on, behind the rest, which it moves to the beginning of a block. A value that is larger than a block doubles it until it is
// behind.
func (t *text) more() error {
	t.flush()
	to := t.block[:0]
	if cap(to) > 2*blockBytes && len(t.rest) < blockBytes {
		to = make([]byte, 0, blockBytes)
	}
	t.block = append(to, t.rest...)
	kept := len(t.block)
	t.block = slices.Grow(t.block, max(kept, blockBytes-kept))
	n, err := io.ReadFull(t.from, t.block[kept:cap(t.block)])
	t.block = t.block[:kept+n]
	t.rest = t.block
	switch {
	case err == nil, n > 0 && errors.Is(err, io.ErrUnexpectedEOF): // if it is no end, the next call is told
		return nil
	case errors.Is(err, io.EOF):
		return errTruncated
	default:
		t.failed = err
		return err
	}
}

// flush hands the batch on, with its block, and goes on in another one.
func (t *text) flush() {
	if len(t.batch) == 0 {
		return
	}
	block, batch := t.block, t.batch
	if free, ok := t.done.Get().(*[]byte); ok {
		t.block = (*free)[:0]
	} else {
		t.block = make([]byte, 0, max(blockBytes, len(t.rest)))
	}
	t.block = append(t.block, t.rest...)
	t.rest, t.batch = t.block, nil
	t.handOn(batch, func() { t.done.Put(&block) })
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
